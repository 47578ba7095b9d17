"""Compares the whole stack with transformers."""

from shardmill.steps import parity
from shardmill.steps.job import execute

execute(parity.run_stack, snakemake)  # noqa: F821 (Snakemake defines it)
