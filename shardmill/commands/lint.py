"""`shardmill lint`: which operations of a program are known to leave the Neural Engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardmill.printable import one_line

STYLES = {"error": "red", "warn": "yellow", "info": "dim"}


def lint(
    path: Annotated[Path, typer.Argument(help="An .mlpackage or .mlmodelc that holds an ML Program.")],
    chip: Annotated[int, typer.Option(min=1, help="Generation of the M-series chip to judge for.")] = 4,
    ios: Annotated[bool, typer.Option("--ios", help="Judge for an iPhone or iPad.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Predict by the placement rules what leaves the Neural Engine. Exit code 1 if there is an error."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shardmill.quiet import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.judge.lint import lint as judge
        from portable_coreml.judge.placement import Target

        rows = judge(path, Target(chip, ios))  # coremltools is imported when the model is read
    errors = sum(row.severity == "error" for row in rows)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "rule", "operation", "why", "what to do instead"):
            table.add_column(column, overflow="fold")
        several = len({row.function for row in rows}) > 1
        for row in rows:
            mark = Text(row.severity, style=STYLES[row.severity])
            where = f"{row.function}: {row.operation}" if several else row.operation
            table.add_row(mark, *map(one_line, (row.rule, where, row.why, row.remedy)))
        console = Console(markup=False, highlight=False)
        if rows:
            console.print(table)
        console.print(f"{path}: {errors} errors, {len(rows) - errors} remarks, all predicted", soft_wrap=True)
    if errors:
        raise typer.Exit(1)
