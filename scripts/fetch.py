"""Links the checkpoint's files into the build and records what they are."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import fetch

execute(fetch.task, snakemake)  # noqa: F821 (Snakemake defines it)
