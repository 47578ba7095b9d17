"""What this machine can and cannot do: one finding per question, each with what follows from it.

`examine` asks the machine; the functions below it decide, from plain values, so that every machine can be tested here.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from shardmill.machine import NATIVE_MISSING, memory_bytes, native_present

Verdict = Literal["ok", "limited", "missing"]
PACKAGE = "shardmill"
PYTHONS = ((3, 11), (3, 13))  # oldest and newest that the pins have wheels for
STATES_NEED = 15  # macOS 15 is the first whose Core ML has states
MEMORY = 8 << 30  # bytes; below it the several jobs of a build at once may not fit
DISK = 2 << 30  # bytes; ample for the demo's artifacts, little for those of a larger model


@dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` stops a build, `limited` says what will not be measured or may fail."""

    subject: str
    value: str
    verdict: Verdict
    meaning: str


def examine() -> list[Finding]:
    """All findings."""
    darwin = platform.system() == "Darwin"
    return [
        python(sys.version_info[:2]),
        system(platform.system(), platform.mac_ver()[0], platform.machine()),
        *engine(darwin, native_present(), platform.mac_ver()[0]),
        compiler(darwin, _compiler_path()),
        *packages(metadata.requires(PACKAGE) or []),
        memory(memory_bytes()),
        disk(shutil.disk_usage(".").free),
        *hub(),
    ]


def python(version: tuple[int, ...]) -> Finding:
    """Whether the pinned packages exist for this Python."""
    value = ".".join(map(str, version))
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return Finding("Python", value, "ok", "supported")
    return Finding("Python", value, "missing", "use 3.11, 3.12 or 3.13: the pinned packages have no others")


def system(name: str, macos: str, machine: str) -> Finding:
    """Operating system and kind of processor: coremltools and torch have packages for two combinations only."""
    found = f"macOS {macos} {machine}" if name == "Darwin" else f"{name} {machine}"
    if (name, machine) == ("Darwin", "arm64"):
        return Finding("system", found, "ok", "Apple silicon")
    if (name, machine) == ("Linux", "x86_64"):
        return Finding("system", found, "ok", "builds and gates; measures no Apple hardware")
    return Finding("system", found, "missing", "use a Mac with Apple silicon, or Linux on x86_64")


def engine(darwin: bool, native: bool, macos: str) -> list[Finding]:
    """What runs programs, and what follows for residency, latency and energy."""
    if not darwin:
        return [
            Finding("engine", "portable", "ok", "programs run on the CPU with torch; parity is checked for real"),
            Finding("residency", "predicted", "limited", "by rules; only a Mac measures it: docs/on-a-mac.md"),
            Finding("ANE speed", "not run", "limited", "only a Mac measures it: docs/on-a-mac.md"),
        ]
    if not native:
        return [Finding("engine", "none", "missing", NATIVE_MISSING)]
    if int(macos.split(".")[0]) < STATES_NEED:
        return [Finding("engine", f"Core ML of macOS {macos}", "missing", f"states need macOS {STATES_NEED} or newer")]
    return [
        Finding("engine", "Core ML", "ok", "programs run where they will run"),
        Finding("residency", "measured", "ok", "by the compute plan"),
        Finding("ANE speed", "measured", "ok", "snakemake --cores 4 all"),
    ]


def compiler(darwin: bool, path: str | None) -> Finding:
    """Apple's command line compiler: convenient, not needed, for coremltools has its own way to the compiler."""
    if path:
        return Finding("coremlcompiler", path, "ok", "compiles from the command line")
    if darwin:
        return Finding("coremlcompiler", "not found", "ok", "not needed; it comes with Xcode")
    return Finding("coremlcompiler", "not found", "ok", "not needed; it exists on a Mac only")


def packages(requirements: list[str]) -> list[Finding]:
    """The installed versions beside the pinned ones; artifacts are the same bytes only with the same packages."""
    from packaging.requirements import Requirement

    findings = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None:  # an extra: for tests and linters only
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            findings.append(Finding(requirement.name, "not installed", "missing", REINSTALL))
            continue
        if installed.partition("+")[0] not in requirement.specifier:
            meaning = f"built and tested with {requirement.specifier}; {REINSTALL}"
            findings.append(Finding(requirement.name, installed, "limited", meaning))
        elif requirement.name in SHOWN:
            findings.append(Finding(requirement.name, installed, "ok", f"as pinned: {requirement.specifier}"))
    return findings


SHOWN = ("coremltools", "torch", "transformers", "snakemake")  # the others only where something is wrong with them
REINSTALL = "pip install -c constraints.txt -e ."


def memory(size: int) -> Finding:
    """Memory that processes may take here, in bytes."""
    value = f"{size / (1 << 30):.1f} GiB"
    if size >= MEMORY:
        return Finding("memory", value, "ok", "enough for the demo")
    return Finding("memory", value, "limited", "build with fewer jobs at once: snakemake --cores 1 all")


def disk(free: int) -> Finding:
    """Free disk space, in bytes."""
    value = f"{free / (1 << 30):.1f} GiB free"
    if free >= DISK:
        return Finding("disk", value, "ok", "enough for the demo")
    return Finding("disk", value, "limited", "little; build/.store keeps what was ever made, and may be deleted")


def hub() -> list[Finding]:
    """Whether checkpoints can be fetched from the hub. The token itself is never shown."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return [Finding("hub", "offline", "limited", "HF_HUB_OFFLINE is set: only what is cached or in a local folder")]
    if get_token():
        return [Finding("hub", "token found", "ok", "gated checkpoints can be fetched where access was granted")]
    return [Finding("hub", "no token", "ok", "public checkpoints only; for gated ones: hf auth login")]


def _compiler_path() -> str | None:
    """Where xcrun finds coremlcompiler."""
    if shutil.which("xcrun") is None:
        return None
    answer = subprocess.run(["xcrun", "--find", "coremlcompiler"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None if answer.returncode == 0 else None
