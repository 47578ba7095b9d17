"""`shardmill audit-range`: how near a model's activations come to the end of fp16."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardmill.engine import Engine

SHOWN = 20


def audit_range(
    build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")],
    prompts: Annotated[Path, typer.Option(help="Text file; its first tokens, up to the context, are run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every operation as one JSON list.")] = False,
) -> None:
    """Run a text in fp16 and show the operations nearest to overflow. Exit code 1 if one overflows or turns NaN.

    Attention scores of masked slots stand at the mask's own 1e4, a headroom of 6.55; look at what is worse than that.
    """
    from rich.console import Console
    from rich.table import Table
    from tokenizers import Tokenizer

    from shardmill import engine, host
    from shardmill.errors import ShardmillError
    from shardmill.quiet import quiet_coremltools

    if not host.is_portable():
        raise ShardmillError("audit-range looks inside the portable engine, which does not run on a Mac; use Linux")
    with quiet_coremltools():
        loaded = engine.load(build)
    tokenizer = json.loads((build / "model.json").read_text())["tokenizer"]["path"]
    tokens = Tokenizer.from_file(str(build / tokenizer)).encode(prompts.read_text(encoding="utf-8")).ids
    rows = audit(loaded, tokens[: loaded.slots])
    bad = [row for row in rows if row["overflows"] or row["nans"]]
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("program", "operation", "output", "largest", "headroom", "overflows", "NaN"):
            table.add_column(column, overflow="fold")
        for row in sorted(rows, key=lambda row: (not row["nans"], not row["overflows"], row["headroom"]))[:SHOWN]:
            figures = f"{row['largest']:.4g}", f"{row['headroom']:.3g} x", str(row["overflows"]), str(row["nans"])
            table.add_row(row["program"], row["kind"], row["output"], *figures)
        console = Console(markup=False, highlight=False)
        console.print(table)
        first = f", the first: {bad[0]['program']} {bad[0]['output']}" if bad else ""
        console.print(f"{len(rows)} operations, {min(len(tokens), loaded.slots)} tokens, {len(bad)} leave fp16{first}")
    if bad:
        raise typer.Exit(1)


def audit(engine: Engine, tokens: list[int]) -> list[dict[str, Any]]:
    """One row per operation of every program, in the order of a pass, over passes of the widest width."""
    from shardmill.gates.passes import cut
    from shardmill.portable import trace
    from shardmill.portable.audit import RangeAudit

    programs = [*engine.layers, *engine.heads]
    audits = [RangeAudit() for _ in programs]
    for program, seen in zip(programs, audits, strict=True):
        program.around = partial(trace, seen)
    engine.reset()
    for step in cut(len(tokens), [max(engine.widths)]):
        engine.forward([tokens[i] for i in step.tokens], step.positions, step.positions)
    pairs = zip(programs, audits, strict=True)
    return [{"program": program.name, **asdict(row)} for program, seen in pairs for row in seen.rows()]
