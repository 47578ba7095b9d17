"""`shardmill check`: does a build run on this machine, on the Neural Engine, and rightly?"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardmill.commands.arguments import Build, Precision
from shardmill.errors import ShardmillError
from shardmill.printable import one_line
from shardmill.runtime.manifest import ENCODER, EXPECTED, RUNTIME, entries, holds_encoder, read_manifest

NoCheck = Annotated[
    bool,
    typer.Option(
        "--no-check", help="Don't compare the programs with the build's recorded results, once on each machine."
    ),
]


def check(
    build: Build,
    precision: Precision = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a build runs on this machine, on the Neural Engine, and rightly. Exit code 1 if it does not."""
    from shardmill.device import check as checks
    from shardmill.runtime import process

    started = time.perf_counter()
    encodes = holds_encoder(build)
    manifest = read_manifest(build, ENCODER if encodes else RUNTIME)
    check_digests(build, manifest)
    if (other := checks.compiled_elsewhere(manifest)) and not as_json:
        typer.echo(one_line(f"its bundles were compiled for {other}: compiled again for this machine"))
    model = process.start_encoder(build, precision) if encodes else process.load_engine(build, precision)
    checked = []
    for one in checks.check_parts(build, manifest, model, precision):
        checked.append(one)
        if not as_json:
            typer.echo(one_line(f"{one.name}: {one.status}: {one.said}"))
    key = checks.receipt_key(build, precision)
    receipt = checks.note_down(key, manifest, checked)
    seconds, ended = time.perf_counter() - started, checks.verdict(checked)
    if as_json:
        rows = [asdict(one) for one in checked]
        content = {"model": manifest["model"], "verdict": ended, **key, "parts": rows, "seconds": round(seconds, 2)}
        typer.echo(json.dumps(content | {"receipt": str(receipt) if receipt else None}))
    else:
        typer.echo(one_line(f"{checks.told(build, checked)} ({seconds:.1f} s)"))
    if ended in (checks.WRONG, checks.ELSEWHERE):
        raise typer.Exit(1)


def check_digests(build: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ShardmillError if a file is not the one that model.json names."""
    from shardmill.checkpoint.hashing import hash_file
    from shardmill.records.audit import added
    from shardmill.records.finished import named_files

    absent = set(added(build)["left_out"])
    for name, sha in (named for entry in entries(manifest) for named in named_files(entry)):
        if not (build / name).is_file() and name in absent:
            continue
        if not (build / name).is_file() or hash_file(build / name) != sha:
            raise ShardmillError(f"{build / name}: not the file that model.json names; pull or build it again")


def check_once(build: Path, model: Any, precision: str, skip: bool) -> str:
    """Check a loaded build unless this machine has done so before; say the result in one line on standard error.

    Args:
        build: the folder.
        model: the loaded build, a `process.Remote`.
        precision: the portable engine's precision.
        skip: whether `--no-check` was given.

    Returns:
        The verdict; "" if nothing was checked.

    Raises:
        ShardmillError: a program is wrong here.
    """
    from rich.console import Console
    from rich.progress import Progress

    from shardmill import machine
    from shardmill.device import check as checks

    if skip or not (build / "model.json").is_file():  # a model without a folder was loaded in another way
        return ""
    manifest = read_manifest(build, ENCODER if holds_encoder(build) else RUNTIME)
    if EXPECTED not in manifest:
        return ""
    key = checks.receipt_key(build, precision)
    if (before := checks.known(key)) and before != checks.WRONG:
        return before
    console, checked = Console(stderr=True), list[checks.Checked]()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"checking {build}", total=len(manifest["parts"]) + 1)
        for one in checks.check_parts(build, manifest, model, precision, placement=not machine.is_portable()):
            checked.append(one)
            progress.advance(bar)
    checks.note_down(key, manifest, checked)
    ended = checks.verdict(checked)
    if ended == checks.WRONG:
        raise ShardmillError(checks.told(build, checked))
    with suppress(OSError):  # a full disk at the end of standard error makes no program wrong
        typer.echo(one_line(f"shardmill: {checks.told(build, checked)}"), err=True)
    return ended
