"""A finished build of a tiny model, as far as a device has to do with it: two programs, a manifest, a table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import coremltools as ct
import portable_coreml
import tiny

from shardmill.checkpoint.hashing import hash_file, tree_hashes
from shardmill.files import write_json
from shardmill.runtime.manifest import runtime_manifest

LAYERS = 2


def finished(folder: Path, name: str = "tiny") -> Path:
    """Writes, converts and compiles it; the folder of the build."""
    portable_coreml.install(precision="fp32")
    source = tiny.fetched(tiny.write_checkpoint(folder / "checkpoint", layers=LAYERS), folder / "source")
    made = tiny.converted(source, folder, topology=[[0, LAYERS]], head={"slices": 1})
    build = folder / name
    programs, packages = {}, {}
    for part, package in made.packages.items():
        shutil.copytree(package, build / f"packages/{part}.mlpackage")
        (build / "compiled").mkdir(exist_ok=True)
        ct.models.utils.compile_model(str(package), str(build / f"compiled/{part}.mlmodelc"))
        programs[part], packages[part] = (
            described(build, f"compiled/{part}.mlmodelc"),
            described(build, f"packages/{part}.mlpackage"),
        )
    shutil.copy(made.table, build / "embedding.safetensors")
    (build / "source").mkdir()
    shutil.copy(source / "tokenizer.json", build / "source/tokenizer.json")
    table = {"path": "embedding.safetensors", "sha256": hash_file(build / "embedding.safetensors")}
    write_json(
        build / "model.json",
        {
            **runtime_manifest(made.plan, programs, table),
            "packages": packages,
            "tokenizer": {
                "path": "source/tokenizer.json",
                "sha256": hash_file(build / "source/tokenizer.json"),
            },
            "texts": {"path": "source", "files": {}},
            "source": {"repo": None, "commit": "local"},
        },
    )
    return build


def described(build: Path, path: str) -> dict[str, Any]:
    """A folder's entry in model.json."""
    return {"path": path, "files": tree_hashes(build / path)[1]}
