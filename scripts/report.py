"""Writes report.html."""

from shardmill.steps import report
from shardmill.steps.job import execute

execute(report.run, snakemake)  # noqa: F821 (Snakemake defines it)
