"""Converts one part to a canonical Core ML package."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import convert

execute(convert.task, snakemake)  # noqa: F821 (Snakemake defines it)
