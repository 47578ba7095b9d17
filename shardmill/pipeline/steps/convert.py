"""convert: one part's canonical Core ML package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import plan
from shardmill.files import digest
from shardmill.pipeline.task import Action, Task, Tools, source_folder


def task(
    part: Path, record: Path, settings: Mapping[str, str], tools: Tools, templates: Path, threads: int = 1
) -> Task:
    """A package depends on its part's content and on how it is converted.

    Args:
        part: parts/P.json.
        record: source.receipt.json, beside which the checkpoint lies.
        settings: the config's `convert`.
        tools: what decides the result besides.
        templates: a folder for what all parts share, made by these tools.
        threads: how many encode weights.
    """
    piece, source = plan.load_part(part), source_folder(record)

    def work(made: Mapping[str, Path]) -> None:
        if settings["method"] == "stamped":
            from shardmill.convert.stamped import convert_stamped

            convert_stamped(piece, source, settings["weights"], made["package"], templates, threads)
        else:
            from shardmill.convert.plain import convert_plain

            convert_plain(piece, source, settings["weights"], made["package"])

    return Task(work, Action("convert", {"part": digest(piece.content)}, settings, **tools))
