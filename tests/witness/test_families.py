"""Every family's tiny model on Apple's Core AI runtime: decoders, groups of experts, encoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import encoders
import pytest
import routed
import templates
import tiny
import torch
import verdicts
from gates.judged import known
from models import tiny_encoders, tiny_families

from shardmill.convert.stamped import convert_stamped
from shardmill.gates.measurement import Measurement, compare
from shardmill.gates.reference import carried_channels
from shardmill.gates.weights import PackageWeights
from shardmill.models import ENCODER, supported
from shardmill.plan import Part
from shardmill.witness import installed, part

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed.is_there(), reason="needs Apple's Core AI runtime, the extra coreai"),
]


def demand(piece: Part, package: Path, plan: Mapping[str, Any], states: Mapping[str, Any], source: Path) -> None:
    """Assert that a part is within every limit."""
    found = part.witness_measurements(
        piece, package, plan, states, source, PackageWeights(package, piece, plan["prefix"])
    )
    rows = compare(one for one in found if isinstance(one, Measurement))
    assert {"witness_error", "witness_agreement"} <= {row["name"] for row in rows}
    verdicts.all_pass(rows)


@pytest.mark.parametrize(("family", "state"), [*((family, "graph") for family in supported()), ("gemma4_text", "host")])
def test_a_decoder_is_the_same(family: str, state: str, tmp_path: Path) -> None:
    """All layers and the LM head, in INT8; with host caches, Gemma 4 has a part that reads caches of another part."""
    source = tiny.fetched(tiny_families.write_tiny(family, tmp_path / "checkpoint"), tmp_path / "source")
    parts, plan = tiny.split(source, topology="auto", head={"slices": 1}, program={"state": state})
    states = known(source, carried_channels(plan), plan["prefix"])
    for name in (name for name in parts if name != "embedding"):
        package = tmp_path / f"{name}.mlpackage"
        convert_stamped(parts[name], source, "int8", package, templates.FOLDER)
        demand(parts[name], package, plan, states, source)


@pytest.mark.parametrize("family", sorted(routed.GROUPS))
def test_groups_of_experts_are_the_same(family: str, tmp_path: Path) -> None:
    """Layers that end in a router, and the first group behind each."""
    built = routed.build(routed.checkpoint(family, tmp_path), tmp_path / "build", routed.GROUPS[family])
    states = known(built.source, carried_channels(built.plan))
    for name, piece in built.parts.items():
        if piece.spec.ends_in_experts or (piece.kind == "experts" and name.endswith("_0")):
            demand(piece, built.packages[name], built.plan, states, built.source)


@pytest.mark.parametrize("family", supported(ENCODER))
def test_an_encoder_is_the_same(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_encoders.write_tiny(family, tmp_path / "checkpoint")
    build = encoders.build(checkpoint, tmp_path / "build", "int8", buckets=[16])
    source, parts, plan = encoders.parts_of(checkpoint, tmp_path / "again", buckets=[16])
    states = {"tokens": torch.tensor(tiny_encoders.tiny_text(16))}
    demand(parts["encoder_16"], build / "encoder_16.mlpackage", plan, states, source)
