"""`shardmill families`: which models can be built."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def families(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the model families that can be built, the checkpoints that they cover, and the configs for them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from shardmill import catalogue

    found, unknown = catalogue.families(), catalogue.unknown()
    if as_json:
        typer.echo(json.dumps({"families": [asdict(family) for family in found], "unknown": unknown}))
        return
    table = Table(box=box.SIMPLE)
    table.add_column("model_type", no_wrap=True)
    table.add_column("builds as")
    table.add_column("covers", overflow="fold")
    table.add_column("configs", overflow="fold")
    for family in found:
        table.add_row(family.model_type, family.kind, family.covers, "\n".join(family.configs))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if unknown:
        console.print(f"not known before the checkpoint is fetched: {', '.join(unknown)}", soft_wrap=True)
