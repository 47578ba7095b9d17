"""Compares one part with transformers."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import parity

execute(parity.run_part, snakemake)  # noqa: F821 (Snakemake defines it)
