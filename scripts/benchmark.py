"""Measures the built model's speed."""

from shardmill.steps import benchmark
from shardmill.steps.job import execute

execute(benchmark.run, snakemake)  # noqa: F821 (Snakemake defines it)
