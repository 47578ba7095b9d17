"""Runs one part on Apple's Core AI runtime and compares it with transformers."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import witness

execute(witness.task, snakemake)  # noqa: F821 (Snakemake defines it)
