"""`shardmill verify`: is every file of a build the one that was built, and who says so?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmill.commands.build import Build
from shardmill.printable import one_line

if TYPE_CHECKING:
    from shardmill.release.proof import Proof

SHOWN = 20


def verify(
    build: Build,
    key: Annotated[list[Path] | None, typer.Option(help="Public key (PEM) of somebody you trust, repeatable.")] = None,
) -> None:
    """Check every byte, statement and signature of a build. Exit code 1 if something is changed, missing or added.

    All records hang on provenance.json, whose sha256 is printed: whoever can write to the folder could have replaced
    them all. With --key they must be signed by one of the keys; without, compare the sha256 with one noted elsewhere.
    """
    from shardmill.checkpoint.hashing import hash_file
    from shardmill.pipeline.audit import ATTESTATION
    from shardmill.release.keys import read_public
    from shardmill.release.proof import prove

    proof = prove(build, [read_public(file) for file in key or ()])
    for name, what in proof.wrong[:SHOWN]:
        typer.echo(f"{one_line(name)}: {one_line(what)}", err=True)
    if len(proof.wrong) > SHOWN:
        typer.echo(f"... and {len(proof.wrong) - SHOWN} more", err=True)
    found = proof.audit
    typer.echo(
        f"{found.checked} files checked, {len(proof.wrong)} wrong; "
        f"{found.unchecked} logs and marks of Snakemake and macOS not checked"
    )
    typer.echo(f"{ATTESTATION}: sha256 {hash_file(build / ATTESTATION)}")
    _tell(proof)
    if proof.wrong:
        typer.echo(
            f"Remove what is wrong (for a file in source/, {build / 'source.receipt.json'} too) and build again: "
            "snakemake --cores 4 all",
            err=True,
        )
        raise typer.Exit(1)


def _tell(proof: Proof) -> None:
    """The table of what is proved by whom."""
    lines = [("what", "proved by", "result"), *((row.what, row.by, row.result) for row in proof.rows)]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for what, by, result in lines:
        typer.echo(f"{what:{widths[0]}}  {by:{widths[1]}}  {result}")
