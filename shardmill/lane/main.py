"""The process that a person starts: it checks the kit, runs all measurements in children, and writes one JSON."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardmill.lane.kit import Kit, LaneError, check_kit, lacking, read_kit
from shardmill.lane.results import OK, STATUSES, Results, write_result
from shardmill.lane.system import system_identity
from shardmill.lane.todo import Progress, groups
from shardmill.lane.watch import Watch

LIMIT = 1800.0  # seconds; the longest first load that has been published took 23 minutes
WRITTEN = ("results.jsonl", "result.json", "log.txt", "work")
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
    options = _parser().parse_args(arguments)
    if options.child is not None:
        from shardmill.lane.child import run_child

        run_child(options.child, script)
        return 0
    try:
        return _measure(script, options)
    except LaneError as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = error.filename2 or error.filename or options.out or script.parent
        print(f"measure.py: {where}: {error.strerror}; {_remedy(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmeasure.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130


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


def _parser() -> argparse.ArgumentParser:
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


def _measure(script: Path, options: argparse.Namespace) -> int:
    native = sys.platform == "darwin"
    if native and options.engine:
        raise LaneError("--engine is for machines without Core ML; leave it out")
    if not native and not options.engine:
        raise LaneError("there is no Core ML here; run it on a Mac, or try the kit out with --engine portable_coreml")
    if why := lacking(script, options.engine):
        raise LaneError(why)
    kit = read_kit(script.parent)
    asked = groups(kit, soaks=options.soak > 0, only=options.only)
    print(f"checking {len(kit.content['files'])} files", flush=True)
    check_kit(kit)
    out = (options.out or script.parent).resolve()
    out.mkdir(parents=True, exist_ok=True)
    header = {"kit": kit.digest, "machine": system_identity(), "engine": {"name": options.engine or "coreml"}}
    results = Results(out / "results.jsonl", header)
    if results.damaged:
        places = ", ".join(map(str, results.damaged))
        print(f"{results.path}: damaged in line {places}; what stood there is measured again", flush=True)
    from shardmill.lane.rounds import RoundRun, bisect, measure

    run = RoundRun(
        kit=kit,
        results=results,
        watch=Watch(script, out / "log.txt", options.timeout),
        work=out / "work",
        engine=options.engine,
        passes=options.passes,
        groups=asked,
        soak=options.soak,
    )
    progress = Progress(asked, results)
    try:
        measure(run, progress)
        write_result(out / "result.json", kit, results)
        if not options.no_bisect:
            bisect(run, progress)
            write_result(out / "result.json", kit, results)
    finally:
        _give_back([out / name for name in WRITTEN])
    print(_closing(kit, results, out / "result.json"))
    if not _number(results, OK):
        why = next(
            (record["detail"] for record in results.records.values() if record["detail"]), "nothing was asked for"
        )
        raise LaneError(f"nothing could be measured here: {why}")
    return 0


def _give_back(paths: Iterable[Path]) -> None:
    """Give root's files back to the user who called sudo: the next run may be without it."""
    user, group = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    if os.geteuid() or not user or not group:
        return
    for top in paths:
        for path in [top, *top.rglob("*")] if top.exists() else []:
            os.chown(path, int(user), int(group), follow_symlinks=False)


def _closing(kit: Kit, results: Results, file: Path) -> str:
    """Return a summary of the results, in some lines."""
    found = [f"{key}: {record['status']}: {record['detail']}" for key, record in _troubles(results)]
    counts = ", ".join(f"{_number(results, status)} {status}" for status in STATUSES if _number(results, status))
    names = " and ".join(kit.variants)
    return "\n".join(
        [
            *found,
            f"{names}: {counts}",
            f"{file}: {'send this file back' if _number(results, OK) else 'holds no figure'}",
        ]
    )


def _troubles(results: Results) -> Iterable[tuple[str, dict[str, str]]]:
    return ((key, record) for key, record in results.records.items() if record["status"] not in ("ok", "not_run"))


def _number(results: Results, status: str) -> int:
    return sum(record["status"] == status for record in results.records.values())
