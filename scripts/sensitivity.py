"""Measures what each matrix costs."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import sensitivity

execute(sensitivity.task, snakemake)  # noqa: F821 (Snakemake defines it)
