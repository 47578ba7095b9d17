"""Writes the plan and the parts."""

from shardmill.steps import split
from shardmill.steps.job import execute

execute(split.run, snakemake)  # noqa: F821 (Snakemake defines it)
