"""Chooses the codes of a part's matrices."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import codes

execute(codes.task, snakemake)  # noqa: F821 (Snakemake defines it)
