"""`shardmill doctor`: what this machine can and cannot do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False) -> None:
    """Say what this machine can and cannot do. Exit code 1 if something that a build needs is missing."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shardmill.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table(box=box.SIMPLE)
        for column in ("", "", "found"):
            table.add_column(column, no_wrap=True)
        table.add_column("which means", overflow="fold")
        for finding in findings:
            mark = Text(finding.verdict, style=STYLES[finding.verdict])
            table.add_row(mark, finding.subject, finding.value, finding.meaning)
        Console(markup=False).print(table)
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)
