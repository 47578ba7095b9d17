"""What is asked of Snakemake's scheduler holds for the Snakemake and the PuLP that are installed."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import snakemake.report
import yaml
from processes import succeeded
from snakemake.cli import get_argument_parser
from snakemake.settings.types import MaxJobsPerTimespan

from shardmill.pipeline import scheduling
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.resolve import lay_out
from shardmill.pipeline.scheduling import EACH_RULE, LOGGER, go_on, say_in_one_line, start_without_delay

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*/config.yaml"))
AS_ON_A_MAC = """
import platform

import pulp

from shardmill.pipeline.scheduling import use_own_solver

platform.system, platform.machine = lambda: "Darwin", lambda: "MACHINE"
pulp.PULP_CBC_CMD.pulp_cbc_path = "FOREIGN"
use_own_solver()

rule all:
    output: "done"
    shell: "touch {output}"
"""
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


@pytest.mark.parametrize(
    ("listed", "given", "failed", "goes"),
    [
        (False, False, [], True),
        (False, False, ["parity"], True),  # so that every gate judges before the run ends
        (False, False, ["parity", "convert"], False),
        (True, False, ["convert"], True),
        (False, True, ["convert"], True),  # --keep-going
    ],
)
def test_what_a_run_goes_on_after(
    listed: bool, given: bool, failed: list[str], goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "gates", lambda workflow: [SimpleNamespace(name="parity")])
    found = workflow([])
    found.scheduler.keepgoing, found.scheduler.failed = given, set()
    go_on(Batch({}, listed=listed), found)
    found.scheduler.failed = [SimpleNamespace(rule=SimpleNamespace(name=name)) for name in failed]
    assert bool(found.scheduler.keepgoing) is goes


@pytest.mark.thorough(but=["pass-True"])
@pytest.mark.parametrize(("start", "timers"), [("start_without_delay(workflow)", False), ("pass", True)])
def test_snakemake_sets_timers_only_under_its_usual_limit(start: str, timers: bool, tmp_path: Path) -> None:
    """Where it sets none under the limit either, the limit need not be lifted any more."""
    (tmp_path / "Snakefile").write_text(WORKFLOW.replace("START", start))
    command = [sys.executable, "-m", "snakemake", "--scheduler", "greedy", "--cores", "1"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    succeeded(said)
    assert (int(said.stdout.split("timers:")[1]) > 0) == timers


def test_snakemake_s_report_has_no_line_for_each_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rules have one script; other lines stay."""
    assert f'f"{EACH_RULE}{{' in inspect.getsource(snakemake.report)  # Snakemake's own words
    logger = logging.getLogger(LOGGER)
    monkeypatch.setattr(logger, "filters", [])
    say_in_one_line()
    lines = [f"{EACH_RULE}split", "Creating report..."]
    records = [logger.makeRecord(LOGGER, logging.INFO, "", 0, line, (), None) for line in lines]
    assert [bool(logger.filter(record)) for record in records] == [False, True]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.parent.name)
def test_every_profile_asks_for_the_scheduler_that_runs_on_every_mac(profile: Path) -> None:
    assert yaml.safe_load(profile.read_text())["scheduler"] == "greedy"


def test_a_folder_made_by_init_has_these_profiles(tmp_path: Path) -> None:
    lay_out(tmp_path / "models")
    made = {path.relative_to(tmp_path / "models"): path.read_bytes() for path in tmp_path.glob("models/profiles/*/*")}
    assert made == {path.relative_to(ROOT): path.read_bytes() for path in PROFILES}
    assert PROFILES


def run_as_on_a_mac(folder: Path, machine: str) -> subprocess.CompletedProcess[str]:
    """Snakemake without a profile, so with the scheduler ilp, on a system that PuLP's own solver is not made for."""
    foreign = folder / "foreign"
    foreign.write_bytes(bytes.fromhex("cffaedfe07000001"))  # how an x86_64 program of macOS begins
    foreign.chmod(0o755)
    written = AS_ON_A_MAC.replace("MACHINE", machine).replace("FOREIGN", str(foreign))
    (folder / "Snakefile").write_text(written)
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", "none", "--cores", "1"]
    environment = os.environ | {"PATH": "/usr/bin:/bin"}  # nor is there another solver
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_without_a_profile_snakemake_goes_on_where_its_solver_cant_be_started(tmp_path: Path) -> None:
    """So for a module of another workflow, and for a user's own profile."""
    said = run_as_on_a_mac(tmp_path, "arm64")
    succeeded(said)
    assert "Falling back to greedy scheduler" in said.stderr
    assert (tmp_path / "done").is_file()


@pytest.mark.thorough
def test_snakemake_ends_with_a_traceback_where_nothing_is_done_about_its_solver(tmp_path: Path) -> None:
    """Where it does not any more, `use_own_solver` may go."""
    said = run_as_on_a_mac(tmp_path, "x86_64")
    assert said.returncode != 0
    assert "OSError" in said.stderr and "foreign" in said.stderr
