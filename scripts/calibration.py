"""Runs transformers on the calibration text."""

from shardmill.pipeline.job import execute
from shardmill.pipeline.steps import calibration

execute(calibration.task, snakemake)  # noqa: F821 (Snakemake defines it)
