"""`shardmill audit-range`: how close a model's activations come to the largest fp16 number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmill.commands.build import Build
from shardmill.commands.prompt import read_text
from shardmill.runtime.load import load_tokenizer
from shardmill.runtime.manifest import read_manifest

if TYPE_CHECKING:
    from rich.console import Console

    from shardmill.gates.nonfinite import Row

COLUMNS = ("layer", "program", "operation", "output", "largest", "headroom", "overflows", "NaN")


def audit_range(
    build: Build,
    prompts: Annotated[Path, typer.Option(help="Text file; as many of its first tokens as fit the context are run.")],
    operations: Annotated[int, typer.Option(min=0, help="How many of the worst operations to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print every operation as one JSON list.")] = False,
) -> None:
    """Run a text in fp16 and show the largest value of each layer. Exit code 1 if one overflows or turns NaN.

    Headroom is 65504, the largest fp16 number, divided by the largest value seen. Slots that the attention mask hides
    don't count, since their values come from the mask.
    """
    from rich.console import Console

    from shardmill import machine
    from shardmill.errors import ShardmillError
    from shardmill.quiet import quiet_coremltools
    from shardmill.runtime import engine

    if not machine.is_portable():
        raise ShardmillError("audit-range looks inside the portable engine, which does not run on a Mac; use Linux")
    text = read_text(prompts)
    ids = load_tokenizer(build, read_manifest(build)).encode(text).ids
    if not ids:
        raise ShardmillError(f"{prompts} holds no text to run")
    with quiet_coremltools():
        loaded = engine.load(build, "fp16")
        from shardmill.gates import nonfinite
    tokens = ids[: loaded.slots]
    rows = nonfinite.audit(loaded, tokens)
    if as_json:
        typer.echo(json.dumps(nonfinite.as_json(rows)))
    else:
        console = Console(markup=False, highlight=False)
        show(console, "Each layer's largest value", nonfinite.by_layer(rows))
        show(console, "The operations nearest to the end of fp16", nonfinite.worst(rows)[:operations])
        console.print(summary(rows, len(tokens), nonfinite.first_to_leave(rows)))
    if any(row.leaves for row in rows):
        raise typer.Exit(1)


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    """One table of operations."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", justify="left" if column in COLUMNS[1:4] else "right")
    for row in rows:
        figures = f"{row.largest:.4g}", f"{row.headroom:.3g} x", str(row.overflows or ""), str(row.nans or "")
        table.add_row("" if row.layer is None else str(row.layer), row.program, row.kind, row.output, *figures)
    console.print(table)


def summary(rows: Sequence[Row], tokens: int, first: Row | None) -> str:
    """One line for the end: how much was run, and what left fp16 first."""
    text = f"{len(rows)} operations, {tokens} tokens: "
    if first is None:
        return text + "all stay in fp16"
    where = first.program if first.layer is None else f"layer {first.layer} of {first.program}"
    left = sum(row.leaves for row in rows)
    return text + f"{left} leave fp16, first {first.kind} {first.output} in {where}, from token {first.first} on"
