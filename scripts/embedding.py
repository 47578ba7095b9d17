"""Writes the host's embedding table."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import embedding

execute(embedding.task, snakemake)  # noqa: F821 (Snakemake defines it)
