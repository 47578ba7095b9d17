"""Runs transformers on the parity text."""

from shardmill.steps import reference
from shardmill.steps.job import execute

execute(reference.run, snakemake)  # noqa: F821 (Snakemake defines it)
