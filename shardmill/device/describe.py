"""The properties of a build that decide its speed: its form, and how much a pass reads, computes and calls."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from shardmill.files import load_json
from shardmill.models.calls import EACH, ONE
from shardmill.models.contract import CACHE_ITEM_BYTES
from shardmill.runtime.manifest import MARK, reshape_frequency, verify_width


def described(build: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a build's form.

    Args:
        build: the folder.
        manifest: the content of its model.json.
    """
    encodes = MARK in manifest
    packages = [build / entry["path"] for entry in manifest["packages"].values()]
    return {
        "kind": "encoder" if encodes else "decoder",
        "context": None if encodes else manifest["context"],
        "verify": None if encodes else verify_width(manifest),
        "widths": widths_of(manifest),
        "shapes": "fixed" if encodes else _shapes(manifest["parts"][0]),
        "state": None if encodes else "host" if any("written" in part for part in manifest["parts"]) else "graph",
        "reshape_frequency": reshape_frequency(manifest) or None,
        "bundles": EACH if any("bundles" in part["program"] for part in manifest["parts"]) else ONE,
        "programs": len(manifest["parts"]),
        "weights_bytes": sum(map(weights_bytes, packages)),
        "state_bytes": sum(CACHE_ITEM_BYTES * prod(shape) for part in manifest["parts"] for shape in _kept(part)),
        "parameters": sum(map(_parameters, packages)),
        "precision": _precision(build),
    }


def _shapes(part: Mapping[str, Any]) -> str:
    """Return the kind of shapes that a decoder's programs accept."""
    names = part.get("functions", {}).values()
    return "range" if not names else "fixed" if all(names) else "enumerated"


def _kept(part: Mapping[str, Any]) -> list[list[int]]:
    """Return the shapes of the states, or of the host's caches."""
    return [*part["states"].values(), *(part["inputs"][name] for name in part.get("written", {}))]


def widths_of(manifest: Mapping[str, Any]) -> list[int]:
    """Return the numbers of tokens that passes have."""
    return list(manifest[MARK] if MARK in manifest else manifest["widths"])


def weights_bytes(package: Path) -> int:
    """Return the bytes of a package's weight files."""
    return sum(file.stat().st_size for file in package.rglob("weights/*"))


def _parameters(package: Path) -> int:
    """Return the number of elements in a package's matrices, for any storage form."""
    from portable_coreml.files.load import load_model
    from portable_coreml.program import TensorType

    found: dict[str, int] = {}
    stored: set[str] = set()  # names from which a matrix is expanded
    for function in load_model(package).program.functions.values():
        for op in function.block.walk():
            if op.kind.split(".")[-1].startswith("const"):
                stored |= {name for names in op.inputs.values() for name in names if isinstance(name, str)}
                kinds = {out.name: out.type for out in op.outputs if isinstance(out.type, TensorType)}
                shapes = {name: [extent or 1 for extent in kind.shape] for name, kind in kinds.items()}
                found |= {name: prod(shape) for name, shape in shapes.items() if sum(n > 1 for n in shape) > 1}
    return sum(count for name, count in found.items() if name not in stored)


def _precision(build: Path) -> str:
    """Return the default form in precision.json; "mixed" if it names matrices, "" if it can't be read."""
    try:
        recipe = load_json(build / "precision.json")
    except (OSError, ValueError):
        return ""
    return "mixed" if recipe.get("matrices") else str(recipe.get("default", ""))
