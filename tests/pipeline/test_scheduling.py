"""What is asked of Snakemake's scheduler holds for the Snakemake that is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.cli import get_argument_parser
from snakemake.settings.types import MaxJobsPerTimespan

from shardmill.pipeline.batch import Batch
from shardmill.pipeline.scheduling import go_on, start_without_delay

WORKFLOW = """
import threading

from shardmill.pipeline.scheduling import start_without_delay

rule all:
    input: "done"

rule done:
    output: "done"
    shell: "touch {output}"

onstart:
    START

onsuccess:
    print("timers:", sum(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
"""


def workflow(words: list[str]) -> Any:
    """As much of a workflow, started with these options, as its scheduler is reached by."""
    limit = get_argument_parser().parse_args(words).max_jobs_per_timespan
    limit = MaxJobsPerTimespan.parse_choice(limit) if isinstance(limit, str) else limit
    scheduler = SimpleNamespace(job_rate_limiter=limit, keepgoing=False)
    return SimpleNamespace(
        scheduling_settings=SimpleNamespace(max_jobs_per_timespan=limit),
        scheduler=scheduler,
    )


def test_the_usual_limit_of_starts_is_lifted() -> None:
    found = workflow([])
    start_without_delay(found)
    assert found.scheduler.job_rate_limiter is None


@pytest.mark.parametrize("given", ["5/1s", "100/1m", "99/1s"])
def test_a_limit_that_was_given_stays(given: str) -> None:
    found = workflow(["--max-jobs-per-timespan", given])
    start_without_delay(found)
    assert found.scheduler.job_rate_limiter.max_jobs == int(given.split("/")[0])


@pytest.mark.parametrize("listed", [False, True])
def test_a_batch_goes_on_after_a_failure_and_one_model_does_not(listed: bool) -> None:
    found = workflow([])
    go_on(Batch({}, listed=listed), found)
    assert found.scheduler.keepgoing is listed


@pytest.mark.parametrize(("start", "timers"), [("start_without_delay(workflow)", False), ("pass", True)])
def test_snakemake_sets_timers_only_under_its_usual_limit(start: str, timers: bool, tmp_path: Path) -> None:
    """Where it sets none under the limit either, the limit need not be lifted any more."""
    (tmp_path / "Snakefile").write_text(WORKFLOW.replace("START", start))
    command = [sys.executable, "-m", "snakemake", "--cores", "1"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert (int(said.stdout.split("timers:")[1]) > 0) == timers
