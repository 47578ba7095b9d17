"""Compares one part with transformers."""

from shardmill.steps import parity
from shardmill.steps.job import execute

execute(parity.run_part, snakemake)  # noqa: F821 (Snakemake defines it)
