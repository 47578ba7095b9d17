"""Runs transformers on the parity text."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import reference

execute(reference.task, snakemake)  # noqa: F821 (Snakemake defines it)
