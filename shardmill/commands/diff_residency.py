"""`shardmill diff-residency`: was the prediction right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.printable import one_line


def diff_residency(
    predicted: Annotated[Path, typer.Argument(help="residency/P.json of a build on Linux.")],
    measured: Annotated[Path, typer.Argument(help="The same part's of a build on a Mac.")],
) -> None:
    """List operations on which a prediction and a measurement disagree. Exit code 1 if there are any."""
    from shardmill.quiet import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.judge.residency_diff import diff_residency as compare
        from portable_coreml.judge.residency_diff import read_report

    rows = read_report(measured, "measured")
    differences = compare(read_report(predicted, "predicted"), rows)
    for d in differences:
        because = f" ({', '.join(d.rules)})" if d.rules else ""
        typer.echo(one_line(f"{d.function} {d.output}: predicted {d.predicted}{because}, measured {d.measured}"))
    left = sum(row.get("status") == "not_chosen" for row in rows)
    aside = f"; {left} were measured eligible, and given to another device" if left else ""
    typer.echo(f"{len(differences)} operations differ{aside}")
    if differences:
        raise typer.Exit(1)
