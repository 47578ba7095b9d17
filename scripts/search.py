"""Finds the forms that a budget buys."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import search

execute(search.task, snakemake)  # noqa: F821 (Snakemake defines it)
