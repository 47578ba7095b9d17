"""The measures of parity."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
from kit_runner.figures import psnr, relative_error

from shardmill.gates import parity
from shardmill.gates.passes import in_passes
from shardmill.gates.runner import PartRunner
from shardmill.gates.thresholds import Allowed
from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import GraphSpec
from shardmill.models.interface import EntryPoints
from shardmill.models.part_kinds import pass_inputs
from shardmill.plan import Part


def test_relative_error_is_the_worst_row_s() -> None:
    expected = np.array([[3.0, 4.0], [30.0, 40.0]])
    assert relative_error(expected + [[0, 0.5], [0, 0.5]], expected) == pytest.approx(0.1)
    assert relative_error(expected, expected) == 0


def test_relative_error_of_a_row_of_zeros_is_no_division_by_zero() -> None:
    assert relative_error(np.zeros((1, 2)), np.zeros((1, 2))) == 0
    assert relative_error(np.full((1, 2), 1e-3), np.zeros((1, 2))) > 1e6


@pytest.mark.parametrize("row", [0, 1])
def test_nan_anywhere_stays_nan(row: int) -> None:
    value = np.ones((2, 2))
    value[row, 1] = np.nan
    assert math.isnan(relative_error(value, np.ones((2, 2))))
    assert math.isnan(psnr(value, np.ones((2, 2))))


def test_psnr_is_twenty_decibels_per_factor_of_ten() -> None:
    expected = np.array([[1.0, -10.0]])
    assert psnr(expected + 0.1, expected) == pytest.approx(40)
    assert psnr(expected + 0.01, expected) == pytest.approx(60)
    assert psnr(expected, expected) > 200
    assert math.isfinite(psnr(expected, np.zeros_like(expected)))


class Remembered:
    """A runner that gives the same result every time."""

    program, lengths = Path(), (8,)

    def __init__(self, result: tuple[Any, dict[str, Any]]) -> None:
        self.result = result
        spec = {"blocks": 1, "tokens": 2, "calls": EntryPoints(), "layers": ((0, LayerSpec()),)}
        self.part = type("Part", (), {"spec": type("GraphSpec", (), spec)()})()
        self.runtime = {"verify": 2}

    def run(self, rows: Any, passes: Any) -> tuple[Any, dict[str, Any]]:
        return self.result


WITHIN = Allowed(limits.model(1, 3).value, "what such a part comes to")


def test_a_state_of_nan_is_seen_wherever_it_stands() -> None:
    x, good = np.ones((4, 3), np.float32), np.ones((1, 4, 2), np.float32)
    for spoilt in ("k_0", "v_0", "k_1"):
        states = {"k_0": good, "v_0": good, "k_1": good}
        runner = Remembered((x, {**states, spoilt: good * np.nan}))
        found = list(parity.width_measurements(runner, {"x": x}, x, states, WITHIN))  # type: ignore[arg-type]
        values = [m.value for m in found if "state" in m.name or "state" in m.detail]
        assert values
        assert all(math.isnan(value) for value in values), spoilt


def test_states_and_outputs_are_judged_apart() -> None:
    x, good = np.ones((4, 3), np.float32), np.ones((1, 4, 2), np.float32)
    runner = Remembered((x * 1.5, {"k_0": good * 1.25}))
    found = list(parity.width_measurements(runner, {"x": x}, x, {"k_0": good}, WITHIN))  # type: ignore[arg-type]
    assert [m.value for m in found] == pytest.approx([0.5, 0.25] * 3)
    assert [m.detail for m in found] == [
        "T=2",
        "state, T=2",
        "mixed",
        "state, mixed",
        "rejected drafts",
        "state, rejected drafts",
    ]


@pytest.mark.parametrize(
    ("kind", "into", "out_of"), [("fuse", 4, 4), ("join", 4, 4), ("head", 4, 1), ("labels", 4, 1), ("experts", 1, 1)]
)
def test_a_stream_is_scaled_in_a_program_and_in_the_model_s_units_outside(kind: str, into: int, out_of: int) -> None:
    """By powers of two, so nothing rounds; a program that returns what it takes shows both."""
    graph = Graph(hidden=4, heads=1, kv_heads=1, head_dim=4, rope_dim=4, ffn=4, rms_norm_eps=1e-5, stream_scale=4.0)
    part, taken = Part("p", GraphSpec(kind, graph, rows=2, tokens=4)), list[Any]()

    class Echo:
        def __call__(self, inputs: dict[str, Any]) -> Any:
            taken.append(next(iter(inputs.values())))
            return taken[-1]

        def move(self, slots: int, keep: bool = True) -> None: ...

        def renew(self) -> None: ...

    echo: Any = Echo()
    runner = PartRunner(Path(), part, {"verify": 1})
    runner.loaded = lambda: echo
    draw = np.random.default_rng(0).standard_normal
    rows = {name: draw((3, shape[1])).astype(np.float32) for name, shape in pass_inputs(part.spec).items()}
    result, _ = runner.run(rows, in_passes(3, [1]))
    x = next(iter(rows.values()))
    assert np.array_equal(np.concatenate([each[0, :, :, 0].T for each in taken]), into * x)
    assert np.array_equal(result, into / out_of * x)
