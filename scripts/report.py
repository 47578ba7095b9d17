"""Writes report.html."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import report

execute(report.task, snakemake)  # noqa: F821 (Snakemake defines it)
