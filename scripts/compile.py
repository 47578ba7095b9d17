"""Compiles one package."""

from shardmill.steps import compile
from shardmill.steps.job import execute

execute(compile.run, snakemake)  # noqa: F821 (Snakemake defines it)
