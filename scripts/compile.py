"""Compiles one package."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import compile

execute(compile.task, snakemake)  # noqa: F821 (Snakemake defines it)
