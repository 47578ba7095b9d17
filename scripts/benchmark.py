"""Measures the built model's speed."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import benchmark

execute(benchmark.task, snakemake)  # noqa: F821 (Snakemake defines it)
