"""compile: .mlpackage -> .mlmodelc, by Apple's compiler on a Mac, by the portable one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import machine
from shardmill.pipeline.steptable import ingredients
from shardmill.pipeline.store import Action, Store, read_receipt

UNVERIFIED = (
    "Written by the portable compiler. No public bundle of Apple's compiler covers states, iOS 18 operations or "
    "blockwise weights, so for these the result is unverified against it; compare on a Mac."
)


def run(package: Path, made: Path, bundle: Path, receipt: Path, store: str) -> None:
    """Args: package the .mlpackage and made its receipt; bundle the .mlmodelc."""
    made_hash = read_receipt(made)["outputs"]["package"]

    def work(out: Mapping[str, Path]) -> None:
        with machine.load_programs_as("fp16"):
            import coremltools as ct

            ct.models.utils.compile_model(str(package), str(out["bundle"]))

    notes: dict[str, Any] = {"engine": machine.engine()} | ({"note": UNVERIFIED} if machine.is_portable() else {})
    Store(Path(store)).perform(action(made_hash), {"bundle": bundle}, receipt, work, {package: made}, **notes)


def action(package: str) -> Action:
    """A bundle depends on its package's tree hash and on whose compiler it is."""
    return Action("compile", {"package": package}, {"engine": machine.engine()}, **ingredients("compile"))
