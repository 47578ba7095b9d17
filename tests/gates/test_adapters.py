"""The gate computes with an adapter, and sees a matrix that lies in the wrong place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapters
import numpy as np
import pytest
import tiny
from models import tiny_families
from portable_coreml.files.model import spec_file
from shared import once

from shardmill.convert.package import load_spec
from shardmill.gates import adapters as gate
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.reference import Reference
from shardmill.gates.runner import PartRunner
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable
from shardmill.models.interface import EntryPoints
from shardmill.runtime.adapter_inputs import Halves, laid_out

pytestmark = pytest.mark.skipif(not is_portable(), reason="measures in fp32, which Core ML does not have")
LIMIT = THRESHOLDS["adapter_error"]


def swapped(array: Halves) -> Halves:
    """The two halves of the rows in each other's place."""
    return np.roll(array, array.shape[2] // 2, axis=2)


def shifted(array: Halves) -> Halves:
    """The slices of the layers in each other's place."""
    return array[:, ::-1]


def unchanged(_: str, array: Halves) -> Halves:
    return array


def measured(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Halves], Halves] = unchanged, package: Path | None = None
) -> dict[str, float]:
    """What the gate measures of the layers of a build, by its passes, if the inputs or the package are changed."""
    build = once("adapters-gate", lambda folder: adapters.build(folder, "phi3", form="int8"))
    parts, plan = tiny.split(build / "source", program=adapters.FIXED, topology="auto", head={"slices": 1})
    part = next(part for part in parts.values() if part.kind == "layers")
    original, source = build / f"packages/{part.name}.mlpackage", build / "source"
    model = tiny.transformers_model(source)
    hidden = model(input_ids=adapters.as_batch(tiny_families.tiny_text()), output_hidden_states=True).hidden_states[0]
    monkeypatch.setattr(
        gate, "laid_out", lambda *given: {name: change(name, array) for name, array in laid_out(*given).items()}
    )
    if package:
        swap_layers(original, package)
    found = gate.adapter_parity(
        PartRunner(package or original, part, plan),
        hidden[0].detach(),
        Reference(source, tiny.CONTEXT),
        PackageWeights(original, part),
    )
    return {one.detail: one.value for one in found if isinstance(one, Measurement)}


def swap_layers(package: Path, into: Path) -> None:
    """Copies a package; in its function for passes of one token, the first two layers get each other's slices."""
    shutil.copytree(package, into)
    spec = load_spec(into)
    function = spec.mlProgram.functions["t1"]
    given, (block,) = {one.name for one in function.inputs}, function.block_specializations.values()
    splits = [op for op in block.operations if op.type == "split" and op.inputs["x"].arguments[0].name in given]
    assert len(splits) == 5
    for op in splits:
        op.outputs[0].name, op.outputs[1].name = op.outputs[1].name, op.outputs[0].name
    spec_file(into).write_bytes(spec.SerializeToString())


def test_a_right_program_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch)
    assert [name for name, value in found.items() if not LIMIT.holds(value)] == []
    assert list(found) == ["T=1", "T=2", "T=3", "T=4"]


@pytest.mark.parametrize(
    ("name", "change"), [("key_value", swapped), ("query", swapped), ("mlp", shifted), ("ffn", np.zeros_like)]
)
def test_a_misplaced_matrix_fails(
    name: str, change: Callable[[Halves], Halves], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(where: str, array: Halves) -> Halves:
        return change(array) if where.endswith(f"adapter_{name}") else array

    assert not any(map(LIMIT.holds, measured(monkeypatch, one).values()))


def test_a_function_that_reads_another_layer_s_slices_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each width of a fixed program is a graph of its own, and only one is wrong here; others take it for a rest."""
    found = measured(monkeypatch, package=tmp_path / "swapped.mlpackage")
    wrong = {name for name, value in found.items() if not LIMIT.holds(value)}
    assert "T=1" in wrong and "T=4" not in wrong


def test_what_is_not_measured_is_said() -> None:
    """An adapter may change a router's choices; without adapters there is nothing to say."""
    for adapted, routes, expected in ((8, True, [gate.ROUTED]), (0, True, []), (0, False, [])):
        runner: Any = SimpleNamespace(
            part=SimpleNamespace(spec=SimpleNamespace(calls=EntryPoints(adapters=adapted), routes=routes)),
            program=Path("p"),
        )
        unread: Any = None
        found = [one for one in gate.adapter_parity(runner, unread, unread, unread) if isinstance(one, NotRun)]
        assert [(one.name, one.reason) for one in found] == [("adapter_error", why) for why in expected]
