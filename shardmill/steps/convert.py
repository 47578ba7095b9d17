"""convert: one part's canonical Core ML package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import canonical, plan
from shardmill.steps import ingredients, source_folder
from shardmill.store import Action, Store


def run(part: Path, record: Path, package: Path, receipt: Path, store: str, weights: str) -> None:
    """Args: part parts/P.json; record source.receipt.json; weights the quantisation, "int8" or "fp16"."""
    piece = plan.load_part(part)
    inputs = {"part": canonical.digest(piece.content)}
    action = Action("convert", inputs, {"weights": weights}, **ingredients("convert"))

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.convert import package as packages
        from shardmill.convert import plain
        from shardmill.convert.weights import read_all

        model = plain.convert(piece, read_all(piece, source_folder(record)), weights)
        packages.save(model, made["package"])

    Store(Path(store)).perform(action, {"package": package}, receipt, work)
