"""Compares the whole stack with transformers."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import parity_stack

execute(parity_stack.task, snakemake)  # noqa: F821 (Snakemake defines it)
