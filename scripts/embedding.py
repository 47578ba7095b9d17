"""Writes the host's embedding table."""

from shardmill.steps import embedding
from shardmill.steps.job import execute

execute(embedding.run, snakemake)  # noqa: F821 (Snakemake defines it)
