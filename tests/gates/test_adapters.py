"""The gate computes with an adapter, and sees a matrix that lies in the wrong place."""

from __future__ import annotations

from collections.abc import Callable

import adapters
import numpy as np
import pytest
import tiny
from models import tiny_families
from shared import once

from shardmill.gates import adapters as gate
from shardmill.gates.parity import PartRunner
from shardmill.gates.reference import Reference
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable
from shardmill.runtime.adapter_inputs import Halves, laid_out

pytestmark = pytest.mark.skipif(not is_portable(), reason="measures in fp32, which Core ML does not have")
LIMIT = THRESHOLDS["program_error"]


def swapped(array: Halves) -> Halves:
    """The two halves of the rows in each other's place."""
    return np.roll(array, array.shape[2] // 2, axis=2)


def shifted(array: Halves) -> Halves:
    """The slices of the layers in each other's place."""
    return array[:, ::-1]


def measured(change: Callable[[str, Halves], Halves], monkeypatch: pytest.MonkeyPatch) -> float:
    """What the gate measures of the layers of a build if the inputs are changed."""
    build = once("adapters-gate", lambda folder: adapters.build(folder, "phi3", form="int8"))
    parts, plan = tiny.split(build / "source", program=adapters.FIXED, topology="auto", head={"slices": 1})
    part = next(part for part in parts.values() if part.kind == "layers")
    package, source = build / f"packages/{part.name}.mlpackage", build / "source"
    model = tiny.transformers_model(source)
    hidden = model(input_ids=adapters.as_batch(tiny_families.tiny_text()), output_hidden_states=True).hidden_states[0]
    monkeypatch.setattr(
        gate, "laid_out", lambda *given: {name: change(name, array) for name, array in laid_out(*given).items()}
    )
    (found,) = gate.adapter_parity(
        PartRunner(package, part, plan),
        hidden[0].detach(),
        Reference(source, tiny.CONTEXT),
        PackageWeights(package, part),
    )
    return found.value


def test_a_right_program_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMIT.holds(measured(lambda _, array: array, monkeypatch))


@pytest.mark.parametrize(
    ("name", "change"), [("key_value", swapped), ("query", swapped), ("mlp", shifted), ("ffn", np.zeros_like)]
)
def test_a_misplaced_matrix_fails(
    name: str, change: Callable[[Halves], Halves], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(where: str, array: Halves) -> Halves:
        return change(array) if where.endswith(f"adapter_{name}") else array

    assert not LIMIT.holds(measured(one, monkeypatch))
