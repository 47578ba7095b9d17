"""Compares the whole stack with transformers."""

from shardmill.steps import parity_stack
from shardmill.steps.job import execute

execute(parity_stack.run, snakemake)  # noqa: F821 (Snakemake defines it)
