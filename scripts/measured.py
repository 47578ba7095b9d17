"""Measures what a set of forms costs."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import measured

execute(measured.task, snakemake)  # noqa: F821 (Snakemake defines it)
