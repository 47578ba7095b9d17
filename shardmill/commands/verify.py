"""`shardmill verify`: are a build's files the ones that its model.json and its provenance name?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")]) -> None:
    """Hash model.json, every file that it names and the gates' verdicts. Exit code 1 if one is missing or changed."""
    from shardmill.pipeline.provenance import mismatches

    checked, wrong = mismatches(build)
    for name, what in wrong:
        typer.echo(f"{name}: {what}", err=True)
    typer.echo(f"{checked} files checked, {len(wrong)} wrong")
    if wrong:
        typer.echo(
            f"Remove what is wrong (for a file in source/, {build / 'source.receipt.json'}) and build again: "
            "snakemake --cores 4 all",
            err=True,
        )
        raise typer.Exit(1)
