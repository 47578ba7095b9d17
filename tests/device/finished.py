"""A finished build of a tiny model, as far as a device has to do with it: two programs, a manifest, a table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coremltools as ct
import portable_coreml
import tiny

from shardmill.checkpoint.hashing import hash_file, tree_hashes
from shardmill.files import write_json
from shardmill.runtime.manifest import runtime_manifest

LAYERS = 2
SETTINGS: dict[str, Any] = {"topology": [[0, LAYERS]], "head": {"slices": 1}}


def finished(folder: Path, name: str = "tiny") -> Path:
    """Writes, converts and compiles it; the folder of the build."""
    source = tiny.fetched(tiny.write_checkpoint(folder / "checkpoint", layers=LAYERS), folder / "source")
    made = tiny.converted(source, folder, **SETTINGS)
    return finish(made.plan, made.packages, made.table, source, folder / name)


def finish(plan: Mapping[str, Any], packages: Mapping[str, Path], table: Path, source: Path, build: Path) -> Path:
    """A folder as a build leaves it, of packages that were converted."""
    portable_coreml.install(precision="fp32")
    (build / "compiled").mkdir(parents=True)
    (build / "source").mkdir()
    for part, package in packages.items():
        shutil.copytree(package, build / f"packages/{part}.mlpackage")
        ct.models.utils.compile_model(str(package), str(build / f"compiled/{part}.mlmodelc"))
    shutil.copy(table, build / table.name)
    shutil.copy(source / "tokenizer.json", build / "source/tokenizer.json")
    compiler = {"compiler": {"name": "portable"}}
    programs = {part: described(build, f"compiled/{part}.mlmodelc") | compiler for part in packages}
    held = {"path": table.name, "sha256": hash_file(build / table.name)}
    tokenizer = {"path": "source/tokenizer.json", "sha256": hash_file(build / "source/tokenizer.json")}
    content = {
        **runtime_manifest(plan, programs, held),
        "packages": {part: described(build, f"packages/{part}.mlpackage") for part in packages},
        "tokenizer": tokenizer,
        "texts": {"path": "source", "files": {}},
        "source": {"repo": None, "commit": "local"},
    }
    write_json(build / "model.json", content)
    return build


def described(build: Path, path: str) -> dict[str, Any]:
    """A folder's entry in model.json."""
    return {"path": path, "files": tree_hashes(build / path)[1]}
