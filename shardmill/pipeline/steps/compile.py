"""compile: .mlpackage -> .mlmodelc, by Apple's compiler on a Mac, by the portable one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import machine
from shardmill.pipeline.task import Action, Artifact, Task, Tools

UNVERIFIED = (
    "Written by the portable compiler. No public bundle of Apple's compiler covers states, iOS 18 operations or "
    "blockwise weights, so for these the result is unverified against it; compare on a Mac."
)


def task(package: Artifact, tools: Tools) -> Task:
    """A bundle depends on its package's bytes and on whose compiler it is."""

    def work(made: Mapping[str, Path]) -> None:
        with machine.load_programs_as("fp16"):
            import coremltools as ct

            ct.models.utils.compile_model(str(package.path), str(made["bundle"]))

    engine = machine.engine()
    notes: dict[str, Any] = {"engine": engine} | ({"note": UNVERIFIED} if machine.is_portable() else {})
    return Task(work, Action("compile", {"package": package.sha256}, {"engine": engine}, **tools), notes)
