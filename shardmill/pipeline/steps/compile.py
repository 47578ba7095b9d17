"""compile: .mlpackage -> .mlmodelc, by Apple's compiler on a Mac, by the portable one elsewhere.

With `program.bundles: each`, the output is a folder with a bundle for each function of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import machine
from shardmill.models.interface import EACH
from shardmill.pipeline.task import Action, Artifact, Task, Tools

UNVERIFIED = (
    "Written by the portable compiler. No public bundle of Apple's compiler covers states, iOS 18 operations or "
    "blockwise weights, so for these the result is unverified against it; compare on a Mac."
)


def task(package: Artifact, bundles: str, engine: Mapping[str, str], tools: Tools) -> Task:
    """Describe a bundle, which depends on the bytes of its package and on the compiler."""

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.convert.package import load_spec
        from shardmill.runtime.bundles import compile_package

        functions = load_spec(package.path).mlProgram.functions if bundles == EACH else ()
        with machine.load_programs_as("fp16"):
            compile_package(package.path, made["bundle"], functions)

    notes: dict[str, Any] = {"engine": engine} | ({"note": UNVERIFIED} if machine.is_portable() else {})
    params = {"engine": engine} | ({"bundles": bundles} if bundles == EACH else {})
    return Task(work, Action("compile", {"package": package.sha256}, params, **tools), notes)
