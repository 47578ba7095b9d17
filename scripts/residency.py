"""Judges where one part's operations run."""

from shardmill.steps import residency
from shardmill.steps.job import execute

execute(residency.run, snakemake)  # noqa: F821 (Snakemake defines it)
