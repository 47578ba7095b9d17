"""Writes the plan and the parts."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import split

execute(split.task, snakemake)  # noqa: F821 (Snakemake defines it)
