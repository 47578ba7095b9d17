"""`shardmill diff`: how do two builds differ?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.commands.build import Build
from shardmill.printable import one_line

if TYPE_CHECKING:
    from shardmill.release.compare import Difference

WORDS = {
    "config": "different in the config",
    "workflow": "a different shardmill",
    "package": "different packages",
    "checkpoint": "a different checkpoint",
    "tensor": "different tensors in the checkpoint",
    "part": "divided into different parts",
    "operations": "different operations",
    "weights": "weights in different forms",
    "bytes": "files with different bytes",
    "verdict": "different numbers from the gates",
    "figure": "different figures from the benchmark",
}
SHOWN = 12


def diff(
    before: Build,
    after: Build,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    everything: Annotated[bool, typer.Option("--all", help=f"Show more than {SHOWN} lines of a kind.")] = False,
) -> None:
    """Show what differs between two builds, from the checkpoint's tensors to the gates' numbers, and why.

    Exit code 0 whether or not something differs.
    """
    from shardmill.release.compare import Side, compare, reasons

    sides = Side(before), Side(after)
    found, why = compare(*sides), reasons(*sides)
    if as_json:
        content = {"differences": [asdict(each) for each in found], "reasons": why}
        typer.echo(json.dumps(content))
        return
    for kind, words in WORDS.items():
        _tell(words, [each for each in found if each.kind == kind], everything)
    if why:
        typer.echo("why:")
    for line in why if everything else why[:SHOWN]:
        typer.echo(f"  {one_line(line)}")
    typer.echo(f"{len(found)} differences" if found else "no difference")


def _tell(words: str, found: list[Difference], everything: bool) -> None:
    """One kind of difference, in a few lines."""
    if found:
        typer.echo(f"{words}:")
    for each in found if everything else found[:SHOWN]:
        typer.echo(f"  {one_line(each.name)}: {_shown(each.before)} -> {_shown(each.after)}")
    if len(found) > SHOWN and not everything:
        typer.echo(f"  ... and {len(found) - SHOWN} more (--all shows them)")


def _shown(value: Any) -> str:
    """A value as a person reads it; hashes are cut."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = one_line(value)
    return f"{text[:12]}..." if len(text) == 64 and text.isalnum() else text
