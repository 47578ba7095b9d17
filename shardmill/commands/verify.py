"""`shardmill verify`: is every file of a build the one that was built?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SHOWN = 20


def verify(build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")]) -> None:
    """Hash every file and compare it with what is recorded. Exit code 1 if one is changed, missing or not the build's.

    The records start from provenance.json, whose sha256 is printed: who may write here could have changed all of them,
    so compare it with one that you noted elsewhere.
    """
    from shardmill.checkpoint.hashing import hash_file
    from shardmill.pipeline.audit import ATTESTATION, audit

    found = audit(build)
    for name, what in found.wrong[:SHOWN]:
        typer.echo(f"{printable(name)}: {what}", err=True)
    if len(found.wrong) > SHOWN:
        typer.echo(f"... and {len(found.wrong) - SHOWN} more", err=True)
    typer.echo(
        f"{found.checked} files checked, {len(found.wrong)} wrong; "
        f"{found.unchecked} logs and marks of Snakemake not checked"
    )
    typer.echo(f"{ATTESTATION}: sha256 {hash_file(build / ATTESTATION)}")
    if found.wrong:
        typer.echo(
            f"Remove what is wrong (for a file in source/, {build / 'source.receipt.json'} too) and build again: "
            "snakemake --cores 4 all",
            err=True,
        )
        raise typer.Exit(1)


def printable(name: str) -> str:
    """A file's name without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in name)
