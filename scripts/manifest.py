"""Writes model.json."""

from shardmill.steps import manifest
from shardmill.steps.job import execute

execute(manifest.run, snakemake)  # noqa: F821 (Snakemake defines it)
