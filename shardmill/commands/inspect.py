"""`shardmill inspect`: what is in an ML Program."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmill.commands.size import size
from shardmill.printable import one_line

if TYPE_CHECKING:
    from portable_coreml.files.contents import Contents, Feature, Function, Weights
    from rich.table import Table


def inspect(
    package: Annotated[Path, typer.Argument(help="An .mlpackage or .mlmodel that holds an ML Program.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a program's inputs, outputs, states, operations and weights."""
    from rich.console import Console

    from shardmill.quiet import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.files.contents import read

        with Console(stderr=True).status(f"reading {package}"):
            contents = read(package)  # coremltools is imported when the model is read
    if as_json:
        typer.echo(json.dumps(asdict(contents)))
        return
    console = Console(highlight=False, markup=False)
    for renderable in render(contents):
        console.print(renderable, soft_wrap=isinstance(renderable, str))


def render(contents: Contents) -> Iterable[str | Table]:
    """What a person reads, in order."""
    yield f"{contents.path}: ML Program, specification {contents.specification}, {size(contents.bytes)}"
    for function in contents.functions:
        yield ""
        yield one_line(f"function {function.name} ({function.opset})")
        yield _features(function)
        yield _operations(function)
    yield _weights(contents.weights) if contents.weights else "no weight files"


def _features(function: Function) -> Table:
    table = _table("", "name", "dtype", "shape")
    groups: tuple[tuple[str, tuple[Feature, ...]], ...] = (
        ("input", function.inputs),
        ("output", function.outputs),
        ("state", function.states),
    )
    for kind, features in groups:
        for feature in features:
            table.add_row(kind, one_line(feature.name), feature.dtype, feature.shape)
    return table


def _operations(function: Function) -> Table:
    table = _table("operation", "count")
    for name, count in function.operations:
        table.add_row(one_line(name), str(count))
    table.add_section()
    table.add_row("all", str(sum(count for _, count in function.operations)))
    return table


def _weights(rows: Iterable[Weights]) -> Table:
    table = _table("weights", "tensors", "elements", "size")
    for row in rows:
        table.add_row(row.dtype, str(row.tensors), f"{row.elements:,}", size(row.bytes))
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="right" if column in ("count", "tensors", "elements", "size") else "left")
    return table
