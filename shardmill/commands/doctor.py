"""`shardmill doctor`: what this machine can and cannot do, one finding per question, each with its consequence.

`examine` queries the machine. The functions below it judge plain values, so tests can simulate every machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardmill.errors import ConfigError
from shardmill.machine import NATIVE_MISSING, ask, macos, memory_bytes, native_present

Verdict = Literal["ok", "limited", "missing"]
PACKAGE = "shardmill"
PYTHONS = ((3, 11), (3, 13))  # the oldest and newest Python with wheels for the pinned versions
STATES_NEED = 15  # macOS 15 is the first version whose Core ML has states
MEMORY = 8 << 30  # bytes; with less, the parallel jobs of a build may not fit
DISK = 2 << 30  # bytes; ample for the demo's artifacts, too few for a larger model's artifacts
GREEDY = "greedy"
TRANSLATED = ("sysctl", "-n", "sysctl.proc_translated")  # 1 in a process that Rosetta runs
ROSETTA = ("arch", "-x86_64", "/bin/echo", "started")  # runs only where Rosetta is installed
SHOWN = ("coremltools", "torch", "transformers", "snakemake")  # others are shown only if they have a problem
REINSTALL = "pip install -c constraints.txt -e ."


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report. `missing` stops a build, `limited` says what will not be measured or may fail."""

    subject: str
    value: str
    verdict: Verdict
    meaning: str


STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False) -> None:
    """Say what this machine can and cannot do. Exit code 1 if something that a build needs is missing."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        columns = [Column(name, no_wrap=True) for name in ("", "", "found")]
        table = Table(*columns, Column("which means", overflow="fold"), box=box.SIMPLE)
        for finding in findings:
            mark = Text(finding.verdict, style=STYLES[finding.verdict])
            table.add_row(mark, finding.subject, finding.value, finding.meaning)
        Console(markup=False).print(table)
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)


def examine() -> list[DoctorFinding]:
    """Return all findings."""
    darwin = platform.system() == "Darwin"
    return [
        python(sys.version_info[:2]),
        system(platform.system(), macos(), platform.machine(), darwin and _said(*TRANSLATED) == "1"),
        *engine_finding(darwin, darwin and _reaches_core_ml(), macos()),
        compiler(darwin, _compiler_path()),
        *packages(metadata.requires(PACKAGE) or []),
        scheduler(darwin, bool(shutil.which("cbc")), _schedulers()),
        memory(memory_bytes()),
        disk(shutil.disk_usage(".").free),
        *(mac(_said(*ROSETTA) == ROSETTA[-1], _said("pmset", "-g"), _said("pmset", "-g", "batt")) if darwin else ()),
        *hub(),
    ]


def python(version: tuple[int, ...]) -> DoctorFinding:
    """Return whether the pinned packages exist for this Python."""
    value = ".".join(map(str, version))
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return DoctorFinding("Python", value, "ok", "supported")
    return DoctorFinding("Python", value, "missing", "use 3.11, 3.12 or 3.13: the pinned packages have no others")


def system(name: str, macos: str, machine: str, translated: bool = False) -> DoctorFinding:
    """Judge system and processor: coremltools and torch have packages for two combinations only.

    `machine` is the processor of this Python build, which Rosetta may run on another processor (`translated`).
    """
    host = f"macOS {macos} {machine}" if name == "Darwin" else f"{name} {machine}"
    if translated:
        meaning = "Rosetta runs this Python, which is Intel's: install one for arm64"
        return DoctorFinding("system", host, "missing", meaning)
    if (name, machine) == ("Darwin", "arm64"):
        return DoctorFinding("system", host, "ok", "Apple silicon")
    if (name, machine) == ("Linux", "x86_64"):
        return DoctorFinding("system", host, "ok", "builds and gates; measures no Apple hardware")
    return DoctorFinding("system", host, "missing", "use a Mac with Apple silicon, or Linux on x86_64")


def engine_finding(darwin: bool, native: bool, macos: str) -> list[DoctorFinding]:
    """Return the engine that runs programs, and the consequences for residency, latency and energy.

    `native` tells whether coremltools' native module can be imported.
    """
    if not darwin:
        return [
            DoctorFinding("engine", "portable", "ok", "programs run on the CPU with torch; parity is checked for real"),
            DoctorFinding("residency", "predicted", "limited", "by rules; only a Mac measures it: docs/on-a-mac.md"),
            DoctorFinding("ANE speed", "not run", "limited", "only a Mac measures it: docs/on-a-mac.md"),
        ]
    if not native:
        return [DoctorFinding("engine", "none", "missing", NATIVE_MISSING)]
    if int(macos.split(".")[0]) < STATES_NEED:
        meaning = f"states need macOS {STATES_NEED} or newer"
        return [DoctorFinding("engine", f"Core ML of macOS {macos}", "missing", meaning)]
    return [
        DoctorFinding("engine", "Core ML", "ok", "programs run where they will run"),
        DoctorFinding("residency", "measured", "ok", "by the compute plan"),
        DoctorFinding("ANE speed", "measured", "ok", "snakemake --cores 4 all"),
    ]


def compiler(darwin: bool, path: str | None) -> DoctorFinding:
    """Look for Apple's command line compiler, which is convenient, but which coremltools does not need."""
    if path:
        return DoctorFinding("coremlcompiler", path, "ok", "compiles from the command line")
    if darwin:
        return DoctorFinding("coremlcompiler", "not found", "ok", "not needed; it comes with Xcode")
    return DoctorFinding("coremlcompiler", "not found", "ok", "not needed; it exists on a Mac only")


def scheduler(darwin: bool, solver: bool, asked: Mapping[str, str]) -> DoctorFinding:
    """Report Snakemake's scheduler: the solver of the default scheduler, ilp, exists for Intel's processors only.

    Args:
        darwin: whether this is a Mac.
        solver: whether PATH contains another solver.
        asked: the scheduler in each profile, by the profile's file; "" if the profile names no scheduler.
    """
    if not darwin or solver:
        return DoctorFinding("scheduler", "any", "ok", "Snakemake's solver can be started")
    others = [f"{file} asks for {name or 'none'}" for file, name in asked.items() if name != GREEDY]
    if others:
        remedy = f"it has no solver for Apple silicon: write scheduler: {GREEDY}"
        return DoctorFinding("scheduler", GREEDY, "limited", f"{', '.join(others)}; {remedy}")
    meaning = "as the profiles here ask; the usual one has no solver for Apple silicon"
    if not asked:
        meaning = f"Snakemake warns that it finds no solver: --scheduler {GREEDY}"
    return DoctorFinding("scheduler", GREEDY, "ok", meaning)


def mac(rosetta: bool, power: str, source: str) -> list[DoctorFinding]:
    """Report whether Rosetta is installed, and whether the power supply or Low Power Mode reduces speed.

    Args:
        rosetta: whether programs for Intel's processors can be started.
        power: the output of `pmset -g`; "" if there is no output.
        source: the output of `pmset -g batt`.
    """
    rows = [DoctorFinding("Rosetta", "installed" if rosetta else "not installed", "ok", "not needed")]
    slow = ["Low Power Mode"] if re.search(r"^\s*(lowpowermode|powermode)\s+1\b", power, re.MULTILINE) else []
    slow += ["on battery"] if "'Battery Power'" in source else []
    if slow:
        rows.append(DoctorFinding("power", ", ".join(slow), "limited", "speeds are lower: plug it in, at full power"))
    elif power and source:
        rows.append(DoctorFinding("power", "full", "ok", "plugged in, not in Low Power Mode"))
    return rows


def packages(requirements: list[str]) -> list[DoctorFinding]:
    """Return the installed versions beside the pinned versions.

    Artifacts have the same bytes only if the packages have the same versions.
    """
    from packaging.requirements import Requirement

    findings = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None:  # an extra: for tests and linters only
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            findings.append(DoctorFinding(requirement.name, "not installed", "missing", REINSTALL))
            continue
        if installed.partition("+")[0] not in requirement.specifier:
            meaning = f"built and tested with {requirement.specifier}; {REINSTALL}"
            findings.append(DoctorFinding(requirement.name, installed, "limited", meaning))
        elif requirement.name in SHOWN:
            findings.append(DoctorFinding(requirement.name, installed, "ok", f"as pinned: {requirement.specifier}"))
    return findings


def memory(size: int) -> DoctorFinding:
    """Return the finding about the memory that processes may use on this machine."""
    value = f"{size / (1 << 30):.1f} GiB"
    if size >= MEMORY:
        return DoctorFinding("memory", value, "ok", "enough for the demo")
    return DoctorFinding("memory", value, "limited", "build with fewer jobs at once: snakemake --cores 1 all")


def disk(free: int) -> DoctorFinding:
    """Free disk space, in bytes."""
    value = f"{free / (1 << 30):.1f} GiB free"
    if free >= DISK:
        return DoctorFinding("disk", value, "ok", "enough for the demo")
    return DoctorFinding("disk", value, "limited", "little; build/.store keeps what was ever made, and may be deleted")


def hub() -> list[DoctorFinding]:
    """Return whether checkpoints can be fetched from the hub. The token itself is never shown."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        meaning = "HF_HUB_OFFLINE is set: only what is cached or in a local folder"
        return [DoctorFinding("hub", "offline", "limited", meaning)]
    if get_token():
        return [DoctorFinding("hub", "token found", "ok", "gated checkpoints can be fetched where access was granted")]
    return [DoctorFinding("hub", "no token", "ok", "public checkpoints only; for gated ones: hf auth login")]


def _said(*command: str) -> str:
    """Return the output of a macOS program; "" if the program is missing or fails."""
    try:
        return ask(*command)
    except (OSError, subprocess.SubprocessError):
        return ""


def _reaches_core_ml() -> bool:
    """Tell whether coremltools' native module can be imported. A module for another processor may end a process."""
    command = [sys.executable, "-c", "import coremltools.libcoremlpython"]
    return native_present() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _schedulers() -> dict[str, str]:
    """Return the scheduler in each profile, by its file: the profiles here and in $SNAKEMAKE_PROFILE."""
    from shardmill.config.reading import read_yaml

    named = os.environ.get("SNAKEMAKE_PROFILE", "").strip()
    files = [*sorted(Path("profiles").glob("[!.]*/config.yaml")), *([Path(named, "config.yaml")] if named else [])]
    schedulers = {}
    for file in (file for file in files if file.is_file()):
        try:
            content = read_yaml(file)
        except ConfigError:  # Snakemake reports this error itself
            continue
        schedulers[str(file)] = str(content.get("scheduler", "")) if isinstance(content, dict) else ""
    return schedulers


def _compiler_path() -> str | None:
    """Return the path of coremlcompiler from xcrun. Without developer tools xcrun would open a dialog."""
    if not _said("xcode-select", "-p"):
        return None
    return _said("xcrun", "--find", "coremlcompiler") or None
