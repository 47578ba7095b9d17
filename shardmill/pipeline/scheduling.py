"""What the workflow asks of Snakemake's scheduler."""

from __future__ import annotations

import platform
import sys
from typing import Any

from shardmill.machine import is_portable
from shardmill.pipeline.batch import Batch

USUAL = (100, 1)  # jobs and seconds of --max-jobs-per-timespan, if it is not given
SOLVER = "cbc"  # the program of Snakemake's scheduler ilp, as PATH may have it


def use_own_solver() -> None:
    """Make the scheduler ilp look for its solver in PATH on a Mac with Apple silicon.

    The solver that PuLP 3 carries is an x86_64 program there. Without Rosetta it can't be started, and Snakemake 9.27
    ends with a traceback before the first job (snakemake/snakemake#3007). Where PATH has no solver, Snakemake says so
    and takes its scheduler greedy. Profiles of this workflow ask for greedy; this is for whoever has a profile of their
    own, or uses the workflow as a module. It works only while the Snakefile is read.
    """
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        carried = getattr(sys.modules.get("pulp"), "PULP_CBC_CMD", None)  # Snakemake has imported it, if it is there
        if carried:
            carried.pulp_cbc_path = SOLVER


def go_on(batch: Batch, workflow: Any) -> None:
    """Lets the other models of a batch be built when a job fails, as --keep-going does."""
    if batch.listed:
        workflow.scheduler.keepgoing = True


def limit_ane(workflow: Any) -> None:
    """Let one job at a time use the Neural Engine, on a Mac where `--resources ane=N` does not say otherwise."""
    if not is_portable() and workflow.is_main_process and workflow.global_resources.get("ane").value is None:
        workflow.global_resources["ane"] = 1


def start_without_delay(workflow: Any) -> None:
    """Lifts Snakemake's usual limit of jobs that start in a second; one that was given stays.

    Under a limit, Snakemake 9.27 sets a timer each time it looks for jobs to start, and looks again when it rings: for
    every job that has ended it looks once more each second, until the scheduler takes a core for itself.
    """
    limit = workflow.scheduling_settings.max_jobs_per_timespan
    if limit and (limit.max_jobs, limit.timespan) == USUAL:
        workflow.scheduler.job_rate_limiter = None
