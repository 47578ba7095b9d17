"""Links the checkpoint's files into the build and records what they are."""

from shardmill.steps import fetch
from shardmill.steps.job import execute

execute(fetch.run, snakemake)  # noqa: F821 (Snakemake defines it)
