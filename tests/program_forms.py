"""Builds of one checkpoint in each form of its programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import templates
import tiny

from shardmill.convert.stamped import convert_stamped
from shardmill.machine import load_programs_as
from shardmill.models.interface import EACH
from shardmill.runtime.bundles import compile_package
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place

FORMS: dict[str, dict[str, Any]] = {
    "range": {},
    "fixed": {"shapes": "fixed"},
    "range, host": {"state": "host"},
    "fixed, host": {"shapes": "fixed", "state": "host"},
    "fixed, host, a bundle each": {"shapes": "fixed", "state": "host", "bundles": "each"},
    "enumerated, host": {"shapes": "enumerated", "state": "host"},
}


def build(source: Path, folder: Path, program: dict[str, Any], **changes: Any) -> tiny.Build:
    """A fetched checkpoint, split and converted in a form."""
    parts, plan = tiny.split(source, program=program, **changes)
    packages = {}
    for name, part in parts.items():
        if part.kind != "embedding":
            packages[name] = folder / f"{name}.mlpackage"
            convert_stamped(part, source, "int8", packages[name], templates.FOLDER)
            if program.get("bundles") == EACH:  # what is loaded is no package then
                package, packages[name] = packages[name], folder / f"{name}.mlmodelc"
                with load_programs_as("fp32"):
                    compile_package(package, packages[name], part.spec.calls.by_name)
    table = tiny.write_table(parts["embedding"], source, folder / "embedding.safetensors")
    return tiny.Build(source, parts, plan, packages, table, ())


def load(build: tiny.Build, layers: int | None = None) -> Engine:
    """Its engine, in fp32, of so many parts of layers; what model.json says has gone through JSON."""
    manifest = json.loads(json.dumps(in_place(build.plan, build.packages, build.table)))
    parts = [part for part in manifest["parts"] if part["kind"] == "layers"][:layers]
    manifest["parts"] = [*parts, *(part for part in manifest["parts"] if part["kind"] == "head")]
    with load_programs_as("fp32"):
        return Engine(manifest, Path("/"))
