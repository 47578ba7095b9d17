"""Writes provenance.json."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import provenance

execute(provenance.task, snakemake)  # noqa: F821 (Snakemake defines it)
