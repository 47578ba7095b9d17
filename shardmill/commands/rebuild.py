"""`shardmill rebuild`: do the same bytes come out again?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill import machine
from shardmill.commands.build import Build


def rebuild(
    build: Build,
    out: Annotated[Path, typer.Option(help="Folder to build in; it is created.")] = Path("rebuilt"),
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Private key (PEM), to sign that you built the same bytes.")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="Folder of the checkpoint, if it is on no hub.")] = None,
    cores: Annotated[int, typer.Option(min=1, help="Cores for Snakemake.")] = machine.cores(),
) -> None:
    """Build again what a provenance.json, a build's folder or hf:OWNER/NAME describes, and compare every byte.

    Exit code 1 if a byte differs, with the step and the ingredient that explain it. For a build with a calibration text
    it says how many codes differ. If packages have other versions, or shardmill has other code, nothing is built.
    """
    from shardmill.release.rebuild import build_again, check_tools, codes_compared, compare, read_original, state

    original = read_original(build)
    check_tools(original)
    again = build_again(original, out, cores, source)
    told = compare(original, again)
    for line in (*told, *codes_compared(original, again)):
        typer.echo(line, err=bool(told))
    count = len(original.statement["subject"])
    if told:
        raise typer.Exit(1)
    typer.echo(f"{count} subjects, 0 differing bytes: {again}")
    for path in state(again, sign, original.folder) if sign else ():
        typer.echo(f"signed: {path}")
