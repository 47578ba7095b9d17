"""Compares one part with transformers."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import parity

execute(parity.task, snakemake)  # noqa: F821 (Snakemake defines it)
