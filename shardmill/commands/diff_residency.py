"""`shardmill diff-residency`: was the prediction right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.printable import one_line


def diff_residency(
    predicted: Annotated[Path, typer.Argument(help="residency/PART.json of a build made on Linux.")],
    measured: Annotated[
        Path, typer.Argument(help="The same file of a build made on a Mac, or a result.json of `shardmill device`.")
    ],
) -> None:
    """List operations on which a prediction and a measurement disagree. Exit code 1 if there are any."""
    from shardmill.quiet import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.judge.residency_diff import diff_residency as compare
        from portable_coreml.judge.residency_diff import read_report

    from shardmill.evidence.file import is_result

    rules = read_report(predicted, "predicted")
    rows = _of_a_device(predicted, measured) if is_result(measured) else read_report(measured, "measured")
    differences = compare(rules, rows)
    for d in differences:
        because = f" ({', '.join(d.rules)})" if d.rules else ""
        typer.echo(one_line(f"{d.function} {d.output}: predicted {d.predicted}{because}, measured {d.measured}"))
    left = sum(row.get("status") == "not_chosen" for row in rows)
    aside = f"; {left} could run on the Neural Engine, but were given to another device" if left else ""
    typer.echo(f"{len(differences)} operations differ{aside}")
    if differences:
        raise typer.Exit(1)


def _of_a_device(predicted: Path, result: Path) -> list[dict[str, Any]]:
    """The measured rows of the part that a prediction is of.

    Raises:
        ShardmillError: the result is not of the build beside whose model.json the prediction lies, or has no such rows.
    """
    from shardmill.evidence.build import read_evidence
    from shardmill.runtime.manifest import COMPLETE, read_manifest

    part = str(load_json(predicted).get("part", predicted.stem))
    found, _ = read_evidence([result], read_manifest(predicted.parent.parent, COMPLETE))
    rows = [row for evidence in found if evidence.is_measured for row in evidence.residency(part)]
    if not rows:
        raise ShardmillError(f"{result} holds no measured residency of {part} of {predicted.parent.parent}")
    return rows
