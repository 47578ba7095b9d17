"""compile: .mlpackage -> .mlmodelc, by Apple's compiler on a Mac, by the portable one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import host
from shardmill.steps import ingredients
from shardmill.store import Action, Store, read_receipt

UNVERIFIED = (
    "Written by the portable compiler. No public bundle of Apple's compiler covers states, iOS 18 operations or "
    "blockwise weights, so for these the result is unverified against it; compare on a Mac."
)


def run(package: Path, made: Path, bundle: Path, receipt: Path, store: str) -> None:
    """Args: package the .mlpackage and made its receipt; bundle the .mlmodelc."""
    made_hash = read_receipt(made)["outputs"]["package"]

    def work(out: Mapping[str, Path]) -> None:
        with host.load_programs_as("fp16"):
            import coremltools as ct

            ct.models.utils.compile_model(str(package), str(out["bundle"]))

    notes: dict[str, Any] = {"engine": host.engine()} | ({"note": UNVERIFIED} if host.is_portable() else {})
    Store(Path(store)).perform(action(made_hash), {"bundle": bundle}, receipt, work, **notes)


def action(package: str) -> Action:
    """A bundle depends on its package's tree hash and on whose compiler it is."""
    return Action("compile", {"package": package}, {"engine": host.engine()}, **ingredients("compile"))
