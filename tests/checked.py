"""Builds that carry what their programs must give, recorded as the step `expected` does it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tiny
import torch
from device.finished import finish
from safetensors.torch import save_file

from shardmill.checkpoint.hashing import hash_file
from shardmill.files import write_json
from shardmill.models.part_kinds import pass_inputs
from shardmill.pipeline.steps import expected
from shardmill.pipeline.task import Artifact
from shardmill.plan import write_part

FILE = "expected.safetensors"
MARGIN = 1e-4  # of logits, within which two tokens may change places
SCALE = 0.5  # of hidden states, which decides how large inputs are


def record(made: tiny.Build, folder: Path) -> Path:
    """Write expected.safetensors of a converted model into a folder, and return it."""
    work = folder / "recording"
    work.mkdir()
    (work / "source").symlink_to(made.source)
    parts = [part for part in made.parts.values() if part.kind == "layers"]
    width = pass_inputs(parts[0].spec)["x"][1] if parts else tiny.HIDDEN
    hidden = torch.full((made.plan["architecture"]["layers"] + 1, 2, width), SCALE)
    later = [part for part in made.parts.values() if part.kind == "encoder" and part.start]
    edges = {part.edge(part.start): torch.full((2, part.spec.graph.hidden), SCALE) for part in later}
    if per_layer := parts[0].spec.graph.per_layer if parts else 0:
        edges["rows"] = torch.full((2, made.plan["architecture"]["layers"] * per_layer), SCALE)
    save_file({"tokens": torch.tensor(made.text), "hidden": hidden, **edges}, work / "states.safetensors")
    write_json(work / "plan.json", dict(made.plan))
    programs = [part for part in made.parts.values() if part.kind != "embedding"]
    for part in made.parts.values():
        write_part(work / f"{part.name}.json", part)
    task = expected.task(
        summary=work / "plan.json",
        parts=[work / f"{part.name}.json" for part in (*programs, made.parts["embedding"])],
        record=work / "source.receipt.json",
        states=Artifact(work / "states.safetensors", "", {}),
        packages=[Artifact(made.packages[part.name], "", {}) for part in programs],
        table=Artifact(made.table, "", {}),
        tools={},
    )
    task.work({"expected": folder / FILE})
    shutil.rmtree(work)
    return folder / FILE


def named(build: Path) -> Path:
    """Let model.json name expected.safetensors as it is now, and return the build."""
    content: dict[str, Any] = json.loads((build / "model.json").read_text())
    content["expected"] = {"path": FILE, "sha256": hash_file(build / FILE)}
    write_json(build / "model.json", content)
    return build


def finished(made: tiny.Build, folder: Path) -> Path:
    """A finished build of a converted model that carries what its programs must give."""
    build = finish(made.plan, made.packages, made.table, made.source, folder / "tiny")
    record(made, build)
    write_json(build / "model.json", json.loads((build / "model.json").read_text()) | {"margin": MARGIN})
    return named(build)
