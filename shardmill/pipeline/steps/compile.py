"""compile: .mlpackage -> .mlmodelc, by Apple's compiler on a Mac, by the portable one elsewhere.

With `program.bundles: each`, what is made is a folder with a bundle for each function of the package.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import machine
from shardmill.models.calls import EACH, own_bundle
from shardmill.pipeline.task import Action, Artifact, Task, Tools

UNVERIFIED = (
    "Written by the portable compiler. No public bundle of Apple's compiler covers states, iOS 18 operations or "
    "blockwise weights, so for these the result is unverified against it; compare on a Mac."
)


def task(package: Artifact, bundles: str, tools: Tools) -> Task:
    """A bundle depends on its package's bytes and on whose compiler it is.

    Args:
        package: the .mlpackage.
        bundles: the config's `program.bundles`.
        tools: what decides the result besides.
    """

    def work(made: Mapping[str, Path]) -> None:
        with machine.load_programs_as("fp16"):
            if bundles == EACH:
                compile_each(package.path, made["bundle"])
            else:
                _compile(package.path, made["bundle"])

    engine = machine.engine()
    notes: dict[str, Any] = {"engine": engine} | ({"note": UNVERIFIED} if machine.is_portable() else {})
    params = {"engine": engine} | ({"bundles": bundles} if bundles == EACH else {})
    return Task(work, Action("compile", {"package": package.sha256}, params, **tools), notes)


def _compile(package: Path, bundle: Path) -> None:
    """Compiles a package."""
    import coremltools as ct

    ct.models.utils.compile_model(str(package), str(bundle))


def compile_each(package: Path, folder: Path) -> None:
    """Compiles each function of a package to a bundle of its own."""
    from shardmill.convert.package import load_spec
    from shardmill.lane.cut import with_one_function

    folder.mkdir()
    for name in sorted(load_spec(package).mlProgram.functions):
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            alone = Path(scratch) / f"{name}.mlpackage"
            with_one_function(package, alone, name)
            _compile(alone, own_bundle(folder, name))
