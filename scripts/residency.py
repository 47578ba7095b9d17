"""Judges where one part's operations run."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import residency

execute(residency.task, snakemake)  # noqa: F821 (Snakemake defines it)
