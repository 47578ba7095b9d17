"""convert: one part's canonical Core ML package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import plan
from shardmill.files import digest
from shardmill.pipeline.steptable import ingredients, source_folder
from shardmill.pipeline.store import TEMPLATES, Action, Store


def run(
    part: Path, record: Path, package: Path, receipt: Path, store: str, settings: Mapping[str, str], threads: int = 1
) -> None:
    """Args: part parts/P.json; record source.receipt.json; settings the config's `convert`."""
    piece, source = plan.load_part(part), source_folder(record)

    def work(made: Mapping[str, Path]) -> None:
        if settings["method"] == "stamped":
            from shardmill.convert.stamped import convert_stamped

            cache = Path(store) / TEMPLATES
            convert_stamped(piece, source, settings["weights"], made["package"], cache, threads)
        else:
            from shardmill.convert import package as packages
            from shardmill.convert import trace
            from shardmill.convert.weights import PartWeights

            packages.save(trace.convert(piece, PartWeights(piece, source), settings["weights"]), made["package"])

    Store(Path(store)).perform(action(piece, settings), {"package": package}, receipt, work)


def action(part: plan.Part, settings: Mapping[str, str]) -> Action:
    """A package depends on its part's content and on how it is converted."""
    return Action("convert", {"part": digest(part.content)}, settings, **ingredients("convert"))
