"""Writes model.json."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import manifest

execute(manifest.task, snakemake)  # noqa: F821 (Snakemake defines it)
