"""model.json: what a runtime needs to load and run a built model. Every path is relative to the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1


def runtime_manifest(
    plan: Mapping[str, Any], programs: Mapping[str, Mapping[str, Any]], embedding: Any
) -> dict[str, Any]:
    """The part of model.json that an engine reads.

    Args: plan plan.json's content; programs by part name, each {"path": ...} and whatever describes the bytes;
    embedding the same for the host's table.
    """
    architecture = plan["architecture"]
    parts = [
        {key: row[key] for key in ("name", "kind", "start", "end")} | {"program": dict(programs[row["name"]])}
        for row in plan["parts"]
        if row["kind"] != "embedding"
    ]
    return {
        "format": FORMAT,
        "model": plan["model"],
        "context": plan["context"],
        "tokens_max": plan["tokens_max"],
        "widths": plan["widths"],
        "vocab": architecture["vocab"],
        "hidden": architecture["graph"]["hidden"],
        "rope": architecture["rope"],
        "mask_value": -1e4,
        "eos_token_ids": plan["eos_token_ids"],
        "embedding": embedding,
        "parts": parts,
    }


def in_place(plan: Mapping[str, Any], programs: Mapping[str, Path], table: Path) -> dict[str, Any]:
    """A manifest for programs that are not yet part of a finished build; its paths start from /."""
    paths = {name: {"path": str(path.resolve())} for name, path in programs.items()}
    return runtime_manifest(plan, paths, {"path": str(table.resolve())})
