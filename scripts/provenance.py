"""Writes provenance.json."""

from shardmill.steps import provenance
from shardmill.steps.job import execute

execute(provenance.run, snakemake)  # noqa: F821 (Snakemake defines it)
