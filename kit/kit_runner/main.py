"""The process that a person starts: it checks the kit, runs all measurements in children, and writes one JSON."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kit_runner.kit import HOW, OK, STATUSES, Kit, KitError, Results, check_kit, read_kit, write_result
from kit_runner.plan import groups
from kit_runner.questions import answers
from kit_runner.runner import KitRun, bisect, measure

CORE_ML_TOOLS = "9.0"
NATIVE = "coremltools.libcoremlpython"
PATIENCE = 600.0  # seconds that the first import of coremltools may take
LIMIT = 1800.0  # seconds; the longest first load that has been published took 23 minutes
LONGEST = 7 * 86400.0  # seconds; upper bound of the time for one measurement
PASSES = 30


def main(script: Path, arguments: Sequence[str] | None = None) -> int:
    """Measure the kit beside measure.py, or run as the child that does.

    Args:
        script: measure.py.
        arguments: of the command line.

    Returns:
        0 if every measurement has its line, 1 after an error or if nothing could be measured, 130 after Ctrl-C.
    """
    options = option_parser().parse_args(arguments)
    if options.child is not None:
        from kit_runner.child import run_child

        run_child(options.child, script)
        return 0
    try:
        _measure(script, options)
    except KitError as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = error.filename2 or error.filename or options.out or script.parent
        print(f"measure.py: {where}: {error.strerror}; {_remedy(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmeasure.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some of the disk; the same command goes on from here"
    if isinstance(error, PermissionError):
        return "give it back to yourself (sudo chown -R $USER FOLDER), or name another folder with --out"
    return "name another folder with --out"


def _seconds(text: str) -> float:
    if not 0 < float(text) <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {LONGEST:.0f} seconds")
    return float(text)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def option_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="measure.py",
        description="Measures the programs of this kit on this machine. A stopped run continues where it was.",
    )
    parser.add_argument("--out", type=Path, help="folder for results and compiled programs; default: beside measure.py")
    parser.add_argument("--timeout", type=_seconds, default=LIMIT, help="seconds that one measurement may take")
    parser.add_argument("--passes", type=_count, default=PASSES, help="passes to take the median speed of")
    parser.add_argument("--engine", help="module that replaces Core ML on other systems, e.g. portable_coreml")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="measure only these kinds, e.g. speed")
    parser.add_argument(
        "--soak", metavar="SECONDS", type=_seconds, default=0.0, help="run passes with pauses for this time, twice"
    )
    parser.add_argument("--no-bisect", action="store_true", help="don't look for the operation that fails to load")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser


def _measure(script: Path, options: argparse.Namespace) -> None:
    native = sys.platform == "darwin"
    if native and options.engine:
        raise KitError("--engine is for machines without Core ML; leave it out")
    if not native and not options.engine:
        raise KitError("there is no Core ML here; run it on a Mac, or try the kit out with --engine portable_coreml")
    if why := lacking(script, options.engine):
        raise KitError(why)
    kit = read_kit(script.parent)
    asked = groups(kit, soaks=options.soak > 0, only=options.only)
    print(f"checking {len(kit.content['files'])} files", flush=True)
    check_kit(kit)
    machine = system_identity()
    for line in over_the_limit(kit, machine["os"], machine["system"]):
        print(line, flush=True)
    out = (options.out or script.parent).resolve()
    out.mkdir(parents=True, exist_ok=True)
    header = {"kit": kit.digest, "machine": machine, "engine": {"name": options.engine or "coreml"}}
    results = Results(out / "results.jsonl", header)
    if results.damaged:
        places = ", ".join(map(str, results.damaged))
        print(f"{results.path}: damaged in line {places}; what stood there is measured again", flush=True)
    run = KitRun(
        kit=kit,
        results=results,
        script=script,
        out=out,
        groups=asked,
        engine=options.engine,
        passes=options.passes,
        timeout=options.timeout,
        soak=options.soak,
    )
    try:
        measure(run)
        write_result(out / "result.json", kit, results)
        if not options.no_bisect:
            bisect(run)
            write_result(out / "result.json", kit, results)
    finally:
        _give_back(out)
    _print_summary(kit, results, out / "result.json")


def over_the_limit(kit: Kit, platform: str, version: str) -> Iterator[str]:
    """Yield a line for each program with more weights than this system is said to take; they are measured all the same.

    A system that is newer than the kit is taken for the newest that the kit knows.
    """
    limits = kit.content["limits"].get("weight_bytes", {})
    known = {int(name.split()[1]): name for name in limits if name.split()[0] == platform}
    major = int(version.split(".")[0]) if version.split(".")[0].isdigit() else 0
    older = [number for number in known if number <= major]
    for variant in kit.variants if older else ():
        for unit in kit.units(variant).values():
            if (size := unit.program["weights"]) > (most := limits[known[max(older)]]):
                said = f"{size / 2**30:.2f} GiB of weights, {platform} {major} is said to take {most / 2**30:.2f}"
                yield f"{variant}/{unit.name}: {said}; expect it on the CPU"


def _give_back(out: Path) -> None:
    """Give root's files back to the user who called sudo: the next run may be without it."""
    user, group = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    if os.geteuid() or not user or not group:
        return
    for top in (out / name for name in ("results.jsonl", "result.json", "log.txt", "work")):
        for path in [top, *top.rglob("*")] if top.exists() else []:
            os.chown(path, int(user), int(group), follow_symlinks=False)


def _print_summary(kit: Kit, results: Results, file: Path) -> None:
    """Print what went wrong and how much did not. Raises KitError if nothing could be measured."""
    for key, record in results.records.items():
        if record["status"] not in (OK, "not_run"):
            print(f"{key}: {record['status']}: {record['detail']}")
    for line in answers(kit.questions, results.records):
        print(line)
    counts = Counter(record["status"] for record in results.records.values())
    listed = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    print(f"{' and '.join([*kit.variants] or ['questions'])}: {listed}")
    print(f"{file}: {'send this file back' if counts[OK] else 'holds no figure'}")
    if not counts[OK]:
        details = (record["detail"] for record in results.records.values() if record["detail"])
        raise KitError(f"nothing could be measured here: {next(details, 'nothing was asked for')}")


def lacking(script: Path, engine: str | None) -> str:
    """Return in one line why this Python can't measure, and the remedy; "" if it can.

    Args:
        script: measure.py.
        engine: module that takes Core ML's place, or None.
    """
    why = _why(engine)
    if not why:
        return ""
    python = script.parent / ".venv/bin/python"
    other = python.is_file() and Path(sys.prefix).resolve() != python.parents[1].resolve()
    return f"{sys.executable}: {why}; {f'use {python} {script.name}' if other else HOW}"


def _why(engine: str | None) -> str:
    """Return what is missing or does not work."""
    for name in ("numpy", "coremltools"):
        if find_spec(name) is None:
            return f"{name} is not installed for this Python {sys.version.split()[0]}"
    version = _version("coremltools")
    if version.split(".")[0] != CORE_ML_TOOLS.split(".")[0]:
        return f"coremltools is {version or 'of no known version'}, and {CORE_ML_TOOLS} is needed"
    wanted = engine or NATIVE  # in a separate process, since importing a native module may end the process
    tried = subprocess.run(
        [sys.executable, "-c", f"import {wanted}"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
        return f"{wanted} can't be imported ({said[-1]})"
    return ""


def _version(package: str) -> str:
    """Return the version of an installed package; "" if it is not known."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def system_identity() -> dict[str, Any]:
    """Return the conditions of a measurement; a run continues only under equal ones."""
    mac = sys.platform == "darwin"
    return {
        "chip": _ask("sysctl", "-n", "machdep.cpu.brand_string") if mac else _processor(),
        # Not platform.mac_ver: depending on the SDK of Python's build, it may call macOS 26 16.0.
        "system": _ask("sw_vers", "-productVersion") if mac else platform.release(),
        "os": "macOS" if mac else platform.system(),
        "build": _ask("sw_vers", "-buildVersion") if mac else platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {name: _version(name) or "missing" for name in ("coremltools", "numpy")},
    }


def _processor() -> str:
    """Return the processor's name on a system other than macOS."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _ask(*command: str) -> str:
    """Return the output of a macOS program. PATH may lack the folder of sysctl, as under sudo and in cron."""
    extra = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/usr/sbin", "SYSTEM_VERSION_COMPAT": "0"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | extra).stdout.strip()
