"""measured: the cost of a set of forms on text that no choice was based on, beside the estimated cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import plan as plans
from shardmill.files import digest, read_json, write_json
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder


def task(
    point: str,
    summary: Path,
    parts: list[Path],
    record: Path,
    chosen: Artifact,
    states: Artifact,
    codes: list[Artifact],
    tools: Tools,
) -> Task:
    """Describe {"foreseen": {...}, "measured": {...}} of one of the search's points, by its name.

    The forms identify a point: if another budget leaves the forms unchanged, the point is not measured again.
    """
    content = read_json(summary)
    known: Mapping[str, Any] = read_json(chosen.path)["points"][point]
    pieces = [plans.load_part(part) for part in parts]

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.measured import measured_forms
        from shardmill.precision.original import original
        from shardmill.precision.part_codes import FormWeights

        source, prefix = source_folder(record), content["prefix"]
        weights = [
            FormWeights(piece, source, one.path, known["forms"], prefix)
            for piece, one in zip(pieces, codes, strict=True)
        ]
        figures = measured_forms(original(source, content), states.path, weights)
        write_json(made["figures"], {"foreseen": known["estimate"], "measured": figures})

    inputs = {
        "parts": digest([piece.content for piece in pieces]),
        "source": content["source"],
        "states": states.sha256,
        "codes": digest([one.sha256 for one in codes]),
    }
    return Task(work, Action("measured", inputs, {"point": digest(known)}, **tools))
