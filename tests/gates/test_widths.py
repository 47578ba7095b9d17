"""What two widths may differ by follows from the model; faults at the edge of it are caught in fp32 and in fp16."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import apart
import limits
import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardmill.errors import GateError
from shardmill.gates.disturbed import DEVIATIONS, FP16, FP32, TIMES, UNITS, Probe, disturbed, probe
from shardmill.gates.measurement import Measurement, compare, demand
from shardmill.gates.thresholds import THRESHOLDS, Allowed
from shardmill.machine import is_portable
from shardmill.runtime import kv
from shardmill.runtime.program import Program

from . import judged

pytestmark = pytest.mark.skipif(not is_portable(), reason="stands in for Core ML, which here would be the real one")
LAYER = "layers_02_03"
Patch = pytest.MonkeyPatch
ERROR = {FP32: r"(width|rejected_draft)(_state)?_error", FP16: "width_error_fp16"}


@pytest.fixture(params=[FP32, FP16])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """The gates on the portable engine, and on one that rounds as Core ML may and is judged as Core ML is."""
    with apart.installed() if request.param == FP16 else nullcontext():
        yield request.param


def widths(rows: judged.Rows, precision: str) -> judged.Rows:
    return [row for row in rows if re.fullmatch(ERROR[precision], row["name"])]


def missed(precision: str) -> Any:
    return pytest.raises(GateError, match=rf"\b{ERROR[precision]} is ")


def is_caught(build: tiny.Build, precision: str) -> None:
    """Demand that the gates of a layer and of the stack miss. On Core ML passes of one token are the stack's alone."""
    if precision == FP32:
        with missed(precision):
            judged.part(build, LAYER)
    with missed(precision):
        judged.whole(build)


# The probe.


class Layer(nn.Module):
    """A layer that multiplies what it is given, and so an error of it."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by - x * (self.by - 1)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def moved(*layers: nn.Module, precision: str = FP32) -> float:
    model = Stack(*layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.gates.disturbed.is_portable", lambda: precision == FP32)
        found = probe(Widths(model), lambda: model(X), model(X)).moved
    return found / UNITS[precision]


class Widths(nn.Module):
    """A model with a matrix, of which the probe asks how long a sum is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.matrix = model, nn.Linear(64, 4)


def test_rounding_moves_a_deeper_model_further() -> None:
    """Errors of n layers add up as the square root of n does."""
    one, four, sixteen = (moved(*(nn.Identity() for _ in range(n))) for n in (1, 4, 16))
    assert four / one == pytest.approx(2, rel=0.25) and sixteen / four == pytest.approx(2, rel=0.25)


def test_the_limit_is_that_of_the_format() -> None:
    """In units of one rounding both are the same, so an fp16 engine may be 8,192 times as far off."""
    assert moved(nn.Identity(), precision=FP16) == pytest.approx(moved(nn.Identity()), rel=0.02)


def test_a_sum_that_cancels_moves_further() -> None:
    class Cancels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.less = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.large(x * 100) - self.less(x * 99)
            return found

    assert moved(Cancels()) > 50 * moved(nn.Identity())


def test_noise_is_gone_afterwards() -> None:
    model = Stack(nn.Identity())
    with disturbed(model, 1e-3):
        assert not torch.equal(model(X), X)
    assert torch.equal(model(X), X)


def test_the_same_noise_again_leaves_nothing_of_a_difference() -> None:
    """Of experts the difference of two runs is compared, most of which both have."""
    model = Stack(nn.Identity(), nn.Identity())
    with disturbed(model, 1e-3):
        assert torch.equal(model(X), model(X))


def test_what_cannot_be_compared_is_said() -> None:
    """Rounding that turns a choice of experts moves a token's result by a third of it."""
    exact = torch.ones(4, 8)
    assert Probe(exact, exact * 1.3, FP16, 64).hopeless.startswith("rounding to fp16 alone moves")
    assert not Probe(exact, exact * 1.04, FP16, 64).hopeless and not Probe(exact, exact * 1.3, FP32, 64).hopeless


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_noisy_result_that_is_not_finite_excuses_nothing(odd: float) -> None:
    """The widths are compared all the same, and not even equal ones pass."""
    exact, found = torch.ones(4, 8), torch.ones(4, 8)
    found[2, 3] = odd
    for precision in (FP32, FP16):
        one = Probe(exact, found, precision, 64)
        assert one.hopeless == ""
        assert not compare([Measurement("width_error_fp16", 0.0, "T=2", one.allowed)])[0]["passed"]


def test_the_margin_is_that_of_logits_that_change_places() -> None:
    """Not of what moves all logits alike."""
    exact = torch.randn(64, 100, generator=torch.Generator().manual_seed(2))
    noise = 0.01 * torch.randn(64, 100, generator=torch.Generator().manual_seed(3))
    # Numbers of up to 8 are rounded to fp32, and DEVIATIONS times what that does to their distances is asked for.
    rounded = limits.Limit(limits.roundings("fp32", 8).value * DEVIATIONS, "margins of numbers of 8 in fp32")
    limits.agrees("the margin", Probe(exact, exact + 5, FP16, 64).margin, rounded)
    assert Probe(exact, exact + noise, FP16, 64).margin == pytest.approx(6 * 0.01 * 2**0.5, rel=0.15)


# The limit.


def test_a_miss_says_number_limit_and_where_the_limit_comes_from() -> None:
    within = Allowed(2e-6, "30 times the 7e-8 by which rounding to fp32 moves transformers' own result")
    rows = compare([Measurement("width_error", 3e-6, "T=4", within)])
    assert (rows[0]["threshold"], rows[0]["passed"]) == ("<= 2e-06", False)
    with pytest.raises(GateError) as error:
        demand("parity layers_00_20", rows)
    assert str(error.value) == (
        "parity layers_00_20: width_error is 3e-06, must be <= 2e-06 (T=4): "
        "30 times the 7e-8 by which rounding to fp32 moves transformers' own result"
    )


def test_no_model_allows_more_than_the_table() -> None:
    limit = THRESHOLDS["width_error"].limit
    (row,) = compare([Measurement("width_error", 2 * limit, "", Allowed(3 * limit, "odd"))])
    assert not row["passed"] and float(row["threshold"].split()[-1]) == limit and "limit_why" not in row


def test_a_limit_that_is_no_number_lets_nothing_pass() -> None:
    assert not compare([Measurement("width_error", 0.0, "", Allowed(float("nan"), "broken"))])[0]["passed"]


# Sound programs, and faults.

WIDEST = {
    FP32: limits.model(tiny.LAYERS, tiny.FFN).value,
    FP16: TIMES * limits.model(tiny.LAYERS, 1, "fp16").value,  # a device sums in a wider format
}


@pytest.mark.thorough(but=["fp32-layers_00_02", "fp32-head_0", "fp32-stack", "fp16-stack"])
@pytest.mark.parametrize("name", ["layers_00_02", LAYER, "head_0", "stack"])
def test_a_sound_program_keeps_away_from_the_limit(built: tiny.Build, name: str, precision: str) -> None:
    """Half of it is left, whatever the processor; and the limit is not so wide that it says nothing."""
    rows = widths(judged.whole(built) if name == "stack" else judged.part(built, name), precision)
    assert rows
    for row in rows:
        limit = float(row["threshold"].split()[-1])
        limits.agrees(f"{row['name']} {row['detail']}", row["value"], limits.Limit(limit, f"{row['name']}'s own"))
        assert row["value"] < 0.5 * limit, row
        assert limit <= WIDEST[precision] and "transformers' own result" in row["limit_why"]


def after_wide_passes(patch: Patch, change: Callable[[Program, Any], Any]) -> None:
    """Changes what programs give, and keep, in passes of several tokens."""
    real = Program.__call__

    def call(self: Program, inputs: Any) -> Any:
        found = real(self, inputs)
        return change(self, found) if found.shape[2] > 1 else found

    patch.setattr(Program, "__call__", call)


@pytest.mark.thorough(but=["fp32-0.25", "fp32-2.0"])
@pytest.mark.parametrize("share", [0.25, 2.0])
def test_the_edge(built: tiny.Build, precision: str, share: float, monkeypatch: Patch) -> None:
    """Logits of wide passes that are off by a little more than the limit are a miss, by much less no miss."""
    limit = float(widths(judged.whole(built), precision)[0]["threshold"].split()[-1])
    off = np.float32(1 + share * limit)
    after_wide_passes(monkeypatch, lambda program, found: found * off if program.name.startswith("head") else found)
    with missed(precision) if share > 1 else nullcontext():
        judged.whole(built)


def off_by_one(patch: Patch, late: Callable[[NDArray[np.int64]], Any]) -> None:
    """Gives some tokens of a pass the rotary tables of the next position."""
    real = kv.KVLayout._rotary
    patch.setattr(kv.KVLayout, "_rotary", lambda self, at: real(self, at + late(at)))


@pytest.mark.thorough(but=["fp32"])
def test_a_width_off_by_a_position(built: tiny.Build, precision: str, monkeypatch: Patch) -> None:
    """All tokens of wide passes."""
    off_by_one(monkeypatch, lambda at: len(at) > 1)
    is_caught(built, precision)


@pytest.mark.thorough(but=["fp32"])
def test_one_token_of_a_pass_off_by_a_position(built: tiny.Build, precision: str, monkeypatch: Patch) -> None:
    """The last one, in passes of the largest width."""
    off_by_one(monkeypatch, lambda at: np.arange(len(at)) == 3)
    is_caught(built, precision)


def hidden_less(patch: Patch, seen: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]) -> None:
    """Lets more slots be seen than those of a token's past."""

    def mask(held: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        visible = (held[None, :] <= positions[:, None]) | seen(held, positions)
        return np.where(visible, np.float32(0), kv.MASKED)[None, None]

    patch.setattr(kv, "attention_mask", mask)


@pytest.mark.thorough(but=["fp32"])
def test_a_rejected_slot_seen(built: tiny.Build, precision: str, monkeypatch: Patch) -> None:
    """All of what a rejected draft left, by all that follow."""
    hidden_less(monkeypatch, lambda held, at: ((held != kv.NEVER) & ~np.isin(held, at))[None, :])
    is_caught(built, precision)


@pytest.mark.thorough(but=["fp32"])
def test_one_stale_slot_seen(built: tiny.Build, precision: str, monkeypatch: Patch) -> None:
    """Only the slot behind the last token's, once there is something in it that a draft left."""
    hidden_less(monkeypatch, lambda held, at: (held == at.max() + 1)[None, :])
    is_caught(built, precision)


@pytest.mark.thorough(but=["fp32"])
def test_one_layer_s_cache_of_another_width(built: tiny.Build, precision: str, monkeypatch: Patch) -> None:
    """After wide passes one layer's values lie a slot too far: output and states of the pass itself are right."""

    def shifted(program: Program, found: Any) -> Any:
        if program.name == LAYER:
            values = np.asarray(program.state.read_state("v_2"), np.float32)
            program.state.write_state("v_2", np.roll(values, 1, axis=2))
        return found

    after_wide_passes(monkeypatch, shifted)
    is_caught(built, precision)


def test_what_only_fp32_can_see(built: tiny.Build, monkeypatch: Patch) -> None:
    """A thousandth of a wide pass's logits is less than fp16's rounding may cost; Linux measures it in the package."""
    after_wide_passes(
        monkeypatch, lambda program, found: found * np.float32(1.001) if program.name.startswith("head") else found
    )
    with missed(FP32):
        judged.whole(built)
    with apart.installed():
        judged.whole(built)
