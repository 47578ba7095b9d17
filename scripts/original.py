"""Runs the original model on text that nothing is chosen by."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import original

execute(original.task, snakemake)  # noqa: F821 (Snakemake defines it)
