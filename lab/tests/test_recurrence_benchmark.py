"""A recurrence in emulated fp16: flat over a long text, because of how it is spelled and when it is folded."""

from __future__ import annotations

from typing import Any

import limits
import numpy as np
import pytest
import torch
from lab_script import load_script
from numpy.typing import NDArray
from torch import Tensor

from shardmill.models import delta_net
from shardmill.models.caches import RING
from shardmill.models.delta_net import GatedDeltaNet, Solved
from shardmill.runtime.kv import Floats, KVLayout

TOKENS, ROUNDING = 1200, 2.0**-11
MOST, GROWTH = 6 * ROUNDING, 1.3  # some ten roundings lie between a token and its output, and none adds up


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_script("recurrence")


class FoldsAlways(KVLayout):
    """Folds what is pending in every pass, as if there were room for one token only."""

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        first, back = int(at[0]), taps - 1
        folded = self.folded if first else 0
        found = super()._recurrent_masks(at, block, taps)
        read, out = found["recurrent_read_mask"], found["recurrent_out_mask"]
        read[:], out[:] = 0, 0
        for number, (start, end) in enumerate(((folded, first), (first, first + len(at)))):
            wanted = np.arange(max(start - back, 0), end)
            read[0, number * (block + back) + wanted - (start - back), wanted % RING, 0] = 1
        out[0, 0, np.arange(len(at)), np.arange(len(at))] = 1
        found["recurrent_keep_mask"][..., 0] = folded > 0
        self.folded = first
        return found


def by_difference(self: GatedDeltaNet, state: Tensor, block: Solved, goes_on: Tensor) -> Tensor:
    """The state times exp(G), which in fp16 is 1 or a whole step less."""
    added = torch.matmul((block.k * block.until).transpose(2, 3), block.u - torch.matmul(block.w * goes_on, state))
    return state * (block.since[:, :, -1:] * goes_on) + added


def holds(errors: NDArray[np.float64]) -> bool:
    """Return whether no head is far off anywhere, nor further off at the end than at the beginning."""
    return bool(np.isfinite(errors).all() and errors.max() <= MOST and (errors[-1] <= GROWTH * errors[0]).all())


def test_the_arithmetic_is_transformers_own_if_nothing_is_rounded(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "rounded", lambda x: x)
    limits.agrees("the layer", benchmark.errors(64, 8).max(), limits.sums("fp32", benchmark.WIDTH, 8))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 8])
def test_no_error_grows_in_fp16(benchmark: Any, width: int) -> None:
    assert holds(benchmark.errors(TOKENS, width))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folded always, by a difference", "by a difference", "no scales"])
def test_without_a_remedy_errors_are_large_or_grow(benchmark: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, width = (FoldsAlways, 1) if "always" in name else (KVLayout, 8)
    if name == "no scales":
        monkeypatch.setattr(delta_net, "Q_SCALE", 1.0)
        monkeypatch.setattr(delta_net, "V_SCALE", 1.0)
    else:
        monkeypatch.setattr(GatedDeltaNet, "folded", by_difference)
    assert benchmark.errors(64, width, host=host).max() < 1  # it computes the layer
    errors = benchmark.errors(TOKENS, width, host=host)
    assert not holds(errors)
    assert errors.max() > MOST if name != "by a difference" else (errors[-1] > GROWTH * errors[0]).any()
