"""Writes down the form of each matrix."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import precision

execute(precision.task, snakemake)  # noqa: F821 (Snakemake defines it)
