"""What a build says on a terminal, by the real Snakemake: its own lines, or Snakemake's where one asks for them."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import succeeded

from shardmill.pipeline import terminal
from shardmill.pipeline.found import closing, found
from shardmill.pipeline.words import about, clock, duration, size

SNAKEFILE = """
from types import SimpleNamespace

from shardmill.pipeline import terminal

MODELS = SimpleNamespace(models={"tiny": None}, listed=False)
terminal.take_over(MODELS, workflow)

include: "rules/steps.smk"

onsuccess:
    terminal.end(MODELS)

onerror:
    terminal.end()

rule all:
    default_target: True
    input: "build/tiny/report.html"
"""
RULES = """
rule split:
    output: summary="build/{model}/plan.json"
    log: "build/{model}/logs/split.log"
    script: "../scripts/step.py"

rule parity:
    input: "build/{model}/plan.json"
    output: verdict="build/{model}/parity/{part}.json"
    log: "build/{model}/logs/parity_{part}.log"
    script: "../scripts/step.py"

rule report:
    input: "build/{model}/parity/head_0.json"
    output: page="build/{model}/report.html"
    log: "build/{model}/logs/report.log"
    script: "../scripts/step.py"
"""
# As a job does: it says things in its log, and on the terminal as well unless it is told to be silent.
SCRIPT = """
import json, os, sys, time
from pathlib import Path

does = json.loads(os.environ["DOES"]).get(snakemake.rule, [])
with open(snakemake.log[0], "w", buffering=1) as log:
    for line in does:
        if line == "killed":
            os.kill(os.getpid(), 9)
        if line == "waits for log":
            while not any("Error in rule" in file.read_text() for file in Path(".snakemake/log").glob("*.log")):
                time.sleep(0.05)
        if line == "waits":
            try:
                time.sleep(100)
            except KeyboardInterrupt:
                line = "ERROR interrupted"
        print(line, file=log)
        if "SHARDMILL_JOBS_ARE_SILENT" not in os.environ:
            print("shardmill", snakemake.rule, line.partition(" ")[2], file=sys.stderr)
        if line.startswith("ERROR"):
            sys.exit(1)
for name, path in snakemake.output.items():
    gate = [{"name": "psnr", "value": 54.21, "passed": True}, {"name": "kl", "value": 0.5, "passed": False}]
    Path(path).write_text(json.dumps({"gate": gate, "parts": [1, 2, 3]}))
"""
FAILS = {"parity": ["INFO worked: not made before", "ERROR parity head_0: kl is 1, must be <= 0.02"]}
WAITS = {"parity": ["INFO half way", "waits"]}
MODEL = {"chat": "a template"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("Snakefile", SNAKEFILE), ("rules/steps.smk", RULES), ("scripts/step.py", SCRIPT)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "build/tiny").mkdir(parents=True)
    (tmp_path / "build/tiny/model.json").write_text(json.dumps(MODEL))
    return tmp_path


def command(*words: str) -> list[str]:
    given = ("--cores", "1", "--workflow-profile", "none", "--scheduler", "greedy")
    return [sys.executable, "-m", "snakemake", *given, *words]


def environment(does: dict[str, list[str]]) -> dict[str, str]:
    return os.environ | {"DOES": json.dumps(does), "TERM": "xterm"}


def run(folder: Path, *words: str, **does: list[str]) -> subprocess.CompletedProcess[str]:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command(*words), cwd=folder, env=environment(does), text=True, check=False, **streams)


def shown(output: str) -> list[str]:
    """The lines, without times."""
    return [re.sub(r"^ *\d+:\d\d |\d+\.\d s$", "", line) for line in output.splitlines()]


def test_a_build_says_what_begins_what_ends_and_what_was_found(folder: Path) -> None:
    """Snakemake's blocks are in its own log; then nothing is to be done, and the last lines are the same."""
    does = {
        "split": ["INFO unchanged"],
        "parity": ["WARNING a \x1b[2J wide gate", "INFO worked: inputs.part"],
        "report": ["INFO All 2 gate numbers hold."],
    }
    done = run(folder, **does)
    succeeded(done)
    last = [
        "shardmill: All 2 gate numbers hold.",
        "shardmill: report: build/tiny/report.html",
        "shardmill: next: shardmill chat build/tiny",
    ]
    assert shown(done.stdout) == [
        "shardmill: tiny: 3 jobs; Ctrl-C stops the build, and the same command goes on from there",
        "[0/3] split: begins",
        "[1/3] split: 2 programs; unchanged; ",
        "[1/3] parity head_0: begins",
        "shardmill parity head_0: a ?[2J wide gate",
        "[2/3] parity head_0: 1 of 2 numbers missed: kl 0.5, psnr 54.2; because of inputs.part; ",
        "[2/3] report: begins",
        "[3/3] report: build/tiny/report.html; ",
        *last,
    ]
    (log,) = (folder / ".snakemake/log").glob("*.log")
    assert "rule split:" in log.read_text() and "reason: Missing output files" in log.read_text()
    again = run(folder)
    succeeded(again)
    assert again.stdout.splitlines()[-4:] == ["shardmill: Nothing to be done", *last]


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ["--verbose", "--quiet", "--printshellcmds"])
def test_whoever_asks_snakemake_for_its_own_output_gets_it(folder: Path, asked: str) -> None:
    """Jobs then say their lines themselves."""
    done = run(folder, "all", asked, split=["INFO unchanged"], report=["INFO All hold."])
    succeeded(done)
    assert "begins" not in done.stdout and "\nshardmill split unchanged\n" in f"\n{done.stdout}"
    assert ("\nrule split:\n" in done.stdout.replace("localrule", "rule")) == (asked != "--quiet")
    assert done.stdout.count("shardmill: next: ") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ["--dry-run", "--touch", "--summary", "--dag"])
def test_what_makes_nothing_is_snakemake_s_own(folder: Path, asked: str) -> None:
    """Line by line as without this module."""
    if asked == "--touch":
        succeeded(run(folder))
    changing = re.compile(r"Workflow ID|Date:|Command:|^\[.*20\d\d\]$|Complete log|Elapsed|Config MD5", re.MULTILINE)
    says = [line for line in run(folder, "all", asked).stdout.splitlines() if not changing.search(line)]
    text = (folder / "Snakefile").read_text()
    (folder / "Snakefile").write_text(text.replace("terminal.take_over(MODELS, workflow)", ""))
    theirs = [line for line in run(folder, "all", asked).stdout.splitlines() if not changing.search(line)]
    if asked == "--touch":  # which is known only after Snakemake has named the machine
        theirs = theirs[theirs.index("Building DAG of jobs...") :]
        says = says[says.index("Building DAG of jobs...") :]
    assert says == theirs and says


@pytest.mark.parametrize(
    ("does", "line"),
    [
        (FAILS["parity"], "shardmill parity tiny head_0: parity head_0: kl is 1, must be <= 0.02"),
        pytest.param(
            ["INFO half", "killed"],
            "shardmill parity tiny head_0: ended without a word; see build/tiny/logs/parity_head_0.log, and whether "
            "the memory was full",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_job_that_fails_is_one_line(folder: Path, does: list[str], line: str) -> None:
    """What Snakemake says of it is in its log alone."""
    done = run(folder, parity=does)
    assert done.returncode == 1
    assert shown(done.stdout)[-1] == line and shown(done.stdout)[-2] == "[1/3] parity head_0: begins"
    (log,) = (folder / ".snakemake/log").glob("*.log")
    assert "Error in rule parity" in log.read_text()


@pytest.mark.thorough
def test_a_failure_that_other_jobs_followed_is_said_again_at_the_end(folder: Path) -> None:
    """Where a person looks. Here the other one waits until the first is said to have failed."""
    rules = (folder / "rules/steps.smk").read_text()
    other = rules.partition("rule parity")[0]
    for old, new in (("rule split", "rule convert"), ("summary", "package"), ("plan.json", "more.json")):
        other = other.replace(old, new)
    (folder / "rules/steps.smk").write_text(rules + other.replace("logs/split", "logs/convert"))
    page = '"build/tiny/report.html"'
    text = (folder / "Snakefile").read_text().replace(page, f'{page}, "build/tiny/more.json"')
    (folder / "Snakefile").write_text(text)
    done = run(folder, "--cores", "2", split=["ERROR no room"], convert=["waits for log"])
    assert done.returncode == 1
    line = "shardmill split tiny: no room"
    lines = shown(done.stdout)
    assert lines.count(line) == 2 and lines[-1] == line and lines[-2].startswith("[1/4] convert: ")


def test_what_snakemake_itself_can_t_do_it_says(folder: Path) -> None:
    done = run(folder, "build/tiny/nothing.json")
    assert done.returncode == 1 and "MissingRuleException" in done.stdout


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


def test_ctrl_c_is_one_line(folder: Path) -> None:
    """That says that the same command goes on; and it does."""
    process = subprocess.Popen(
        command(), cwd=folder, env=environment(WAITS), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = lines_of(process)
    assert any("parity head_0: half way" in line for line in said)  # while the job runs
    os.killpg(process.pid, signal.SIGINT)
    assert list(said) == ["shardmill: interrupted; the same command goes on from there\n"]
    assert process.wait() == 1
    done = run(folder)
    succeeded(done)
    assert "[0/2] parity head_0: begins" in shown(done.stdout)


@pytest.mark.thorough
def test_a_person_at_a_terminal_sees_what_runs_below_what_is_done(folder: Path) -> None:
    """One line, which is drawn anew and does not stay."""
    ours, theirs = pty.openpty()
    does = {"parity": ["INFO half way", "waits"]}
    process = subprocess.Popen(
        command(), cwd=folder, env=environment(does), stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    text = b""
    while b"half way" not in text:
        text += os.read(ours, 10_000)
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    while True:
        try:
            more = os.read(ours, 10_000)
        except OSError:  # the end, on Linux
            break
        if not more:
            break
        text += more
    assert re.search(r"\[1/3\]: parity head_0 \([\d.]+ s, half way\)\r\x1b\[2K", text.decode()), text
    stays = [line.rpartition("\x1b[2K")[2] for line in text.decode().replace("\r\n", "\n").split("\n")]
    assert [re.sub(r"^ *\d+:\d\d |\d+\.\d s$", "", line) for line in stays if line][-2:] == [
        "[1/3] split: 2 programs; ",
        "shardmill: interrupted; the same command goes on from there",
    ]
    assert "begins" not in text.decode()


@pytest.mark.thorough
def test_a_fault_of_these_lines_leaves_the_build_to_snakemake(folder: Path) -> None:
    text = (folder / "Snakefile").read_text()
    broken = "terminal.found = None\nterminal.take_over(MODELS, workflow)"
    (folder / "Snakefile").write_text(text.replace("terminal.take_over(MODELS, workflow)", broken))
    done = run(folder)
    succeeded(done)
    assert "shardmill can't say how the build is doing" in done.stdout and "rule report:" in done.stdout
    assert (folder / "build/tiny/report.html").is_file()


def test_a_logger_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Snakemake has no handler of its own for the terminal, nothing is taken over."""
    logger, own = logging.getLogger(terminal.LOGGER), logging.NullHandler()
    monkeypatch.setattr(logger, "handlers", [own])
    output = SimpleNamespace(**dict.fromkeys(("verbose", "quiet", "debug_dag", "printshellcmds"), False))
    output.dryrun = False
    batch: Any = SimpleNamespace(models={}, listed=False)
    terminal.take_over(batch, SimpleNamespace(output_settings=output, is_main_process=True))
    assert logger.handlers == [own]


MADE = {
    ("fetch", "record"): ({"files": {"a": {"size": 1500}, "b": {"size": 500}}}, "2 files, 2.0 kB"),
    ("split", "summary"): ({"parts": [1, 2, 3]}, "2 programs"),
    ("parity", "verdict"): (
        {"gate": [{"name": "kl", "value": 0.00123, "passed": True}, {"name": "x", "value": 1, "passed": True}]},
        "2 numbers hold: kl 0.00123",
    ),
    ("residency", "verdict"): (
        {"evidence": "predicted", "gate": [{"name": "ineligible", "value": 0, "passed": True}]},
        "1 number holds, by prediction",
    ),
    ("benchmark", "speed"): (
        {"pass_seconds": {"4": 0.02, "1": 0.0161}, "engine": {"name": "portable"}},
        "16.1 ms for a pass of 1 token, portable engine",
    ),
    ("split", "other"): ({}, ""),
}


@pytest.mark.parametrize(("step", "name"), MADE)
def test_what_a_job_found_is_read_from_what_it_made(step: str, name: str, tmp_path: Path) -> None:
    content, said = MADE[step, name]
    (tmp_path / "made.json").write_text(json.dumps(content))
    assert found(step, {name: str(tmp_path / "made.json")}) == said
    assert found(step, {name: str(tmp_path / "missing.json")}) == ""


def test_a_package_is_as_large_as_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.mlpackage/inner").mkdir(parents=True)
    (tmp_path / "a.mlpackage/inner/weights").write_bytes(bytes(3_000_000))
    (tmp_path / "a.mlpackage/Manifest.json").write_bytes(bytes(100_000))
    assert found("convert", {"package": str(tmp_path / "a.mlpackage"), "receipt": "elsewhere"}) == "3.1 MB"


NEXT = {
    "chat": ({"chat": {}}, "shardmill chat {build}"),
    "base": ({}, 'shardmill generate {build} --prompt "..."'),
    "labels": ({"buckets": [16], "labels": ["a"]}, 'shardmill label {build} --text "..."'),
    "embeds": ({"buckets": [16]}, "shardmill serve {build}"),
}


@pytest.mark.parametrize("kind", NEXT)
def test_what_comes_next_is_what_the_model_is_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of a build that is not finished, or of several models."""
    monkeypatch.chdir(tmp_path)
    build, (manifest, then) = Path("build/m"), NEXT[kind]
    batch: Any = SimpleNamespace(models={"m": None}, listed=False)
    assert [*closing(batch)] == []
    (build / "logs").mkdir(parents=True)
    (build / "model.json").write_text(json.dumps(manifest))
    (build / "logs/report.log").write_text("INFO All hold.\nDEBUG 3 s of CPU\n")
    assert [*closing(batch)] == []
    (build / "report.html").touch()
    assert [*closing(batch)][-1] == f"shardmill: next: {then.format(build=build)}" and len([*closing(batch)]) == 3
    assert [*closing(SimpleNamespace(models={"m": None}, listed=True))] == []  # type: ignore[arg-type]


def test_sizes_and_times_are_as_people_say_them() -> None:
    assert [size(n) for n in (999, 1000, 2_450_000, 3e12)] == ["999 B", "1.0 kB", "2.5 MB", "3000.0 GB"]
    assert [duration(n) for n in (0.44, 9.94, 9.96, 59.6, 200, 7500)] == [
        *("0.4 s", "9.9 s", "10 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"),
    ]
    assert [about(n) for n in (3, 44, 100, 3500, 7900)] == [
        *("under 10 s", "about 40 s", "about 2 min", "about 58 min", "about 2 h 10 min"),
    ]
    assert [clock(n) for n in (0.4, 200, 3723)] == [" 0:00", " 3:20", "1:02:03"]
