"""Converts one part to a canonical Core ML package."""

from shardmill.steps import convert
from shardmill.steps.job import execute

execute(convert.run, snakemake)  # noqa: F821 (Snakemake defines it)
