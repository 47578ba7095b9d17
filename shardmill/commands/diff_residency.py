"""`shardmill diff-residency`: was the prediction right?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def diff_residency(
    predicted: Annotated[Path, typer.Argument(help="residency/P.json of a build on Linux.")],
    measured: Annotated[Path, typer.Argument(help="The same part's of a build on a Mac.")],
) -> None:
    """List operations on which a prediction and a measurement disagree. Exit code 1 if there are any."""
    from shardmill.quiet import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.judge.residency_diff import diff_residency as compare

    rows = read(measured, "measured")
    differences = compare(read(predicted, "predicted"), rows)
    for d in differences:
        because = f" ({', '.join(d.rules)})" if d.rules else ""
        typer.echo(f"{d.function} {d.output}: predicted {d.predicted}{because}, measured {d.measured}")
    left = sum(row.get("status") == "not_chosen" for row in rows)
    aside = f"; {left} were measured eligible, and given to another device" if left else ""
    typer.echo(f"{len(differences)} operations differ{aside}")
    if differences:
        raise typer.Exit(1)


def read(path: Path, evidence: str) -> list[dict[str, Any]]:
    """Rows of a residency report. Raises ShardmillError for another file or for the other kind of report."""
    from shardmill.errors import ShardmillError

    try:
        report = json.loads(path.read_text())
        rows: list[dict[str, Any]] = report["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShardmillError(f"{path} is no residency report: {error}") from error
    if report.get("evidence") != evidence:
        raise ShardmillError(f"{path} holds {report.get('evidence')} rows, not {evidence} ones")
    return rows
