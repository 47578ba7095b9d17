"""Canonical packages: the same program gives the same bytes in every process, on every machine.

coremltools writes a conversion date, random identifiers into the manifest, and protobuf maps in the order of a hash
seed. Here the date goes, the identifiers are derived from the files' paths in the package, and maps are sorted.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from coremltools.proto import Model_pb2

from shardmill.files import load_json

MODEL_FILE = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHT_FILE = Path("Data/com.apple.CoreML/weights/weight.bin")
VARYING = "com.github.apple.coremltools.conversion_date"


def save(model: Any, path: Path) -> None:
    """Writes an MLModel as a canonical .mlpackage at `path`, which must not exist."""
    model.save(str(path))
    canonicalize(path)


def canonicalize(path: Path) -> None:
    """Rewrites the package at `path` in place."""
    spec = load_spec(path)
    spec.description.metadata.userDefined.pop(VARYING, None)
    (path / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))
    manifest = load_json(path / "Manifest.json")
    entries = sorted(manifest["itemInfoEntries"].values(), key=lambda entry: entry["path"])
    names = {entry["path"]: str(uuid.uuid5(uuid.NAMESPACE_URL, entry["path"])).upper() for entry in entries}
    manifest["itemInfoEntries"] = {names[entry["path"]]: entry for entry in entries}
    manifest["rootModelIdentifier"] = names[MODEL_FILE.relative_to("Data").as_posix()]
    (path / "Manifest.json").write_text(json.dumps(manifest, indent=4, sort_keys=True) + "\n")
    for file in path.rglob("*"):  # coremltools gives some files the mode of a temporary one
        file.chmod(0o755 if file.is_dir() else 0o644)


def load_spec(path: Path) -> Any:
    """The protobuf of a package."""
    spec = Model_pb2.Model()
    spec.ParseFromString((path / MODEL_FILE).read_bytes())
    return spec
