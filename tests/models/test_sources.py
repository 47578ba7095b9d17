"""A block of a constant holds the checkpoint's values, and they can be had back from it."""

from __future__ import annotations

import limits
import pytest
import torch

from shardmill.models.architecture import TensorSource
from shardmill.models.sources import assembled, magnitude, picked, put_back, turned, undone

STACK = torch.arange(24.0).reshape(2, 3, 4) - 7

SOURCES = {
    "as it is": TensorSource("w"),
    "a gain of 1 + weight, scaled": TensorSource("w", add=1.0, times=0.125),
    "transposed": TensorSource("w", transposed=True),
    "every other row": TensorSource("w", rows=(1, 3, 2)),
    "columns, transposed, one in two": TensorSource("w", transposed=True, rows=(0, 4, 2)),
    "one of the last axis": TensorSource("w", column=2),
    "brought to one magnitude": TensorSource("w", magnitude="divide"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_source_does_can_be_undone(name: str) -> None:
    """A gate gives transformers the values that a package holds."""
    source, stored = SOURCES[name], STACK[1]
    block = turned(stored, source)
    assert tuple(block.shape) == source.block_shape(tuple(stored.shape))
    target, size = torch.zeros_like(stored), magnitude(stored) if source.magnitude else 1.0
    put_back(target, block, source, size)
    assert torch.equal(picked(target, source), picked(stored, source))


def test_a_repeated_number_is_put_back_once() -> None:
    source, target = TensorSource("w", repeat=3), torch.zeros(4)
    block = turned(STACK[0, 0], source)
    assert (block.tolist(), source.block_shape((4,))) == (STACK[0, 0].repeat_interleave(3).tolist(), (12,))
    put_back(target, block, source)
    assert torch.equal(target, STACK[0, 0])


def test_vectors_beside_a_table_are_added_and_multiplied() -> None:
    """ZAYA's embedding is (e + bias) * scale."""
    plus, by = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 2.0, 4.0, 4.0])
    source = TensorSource("w", plus="b", by="s", times=0.5)
    rows = turned(STACK[0], source, [plus, by])
    assert torch.equal(rows, (STACK[0] + plus) * by * 0.5)
    assert torch.equal(undone(rows, source, [plus, by]), STACK[0])


@pytest.mark.parametrize("add", [0.0, 0.5])
def test_softplus_is_undone_at_every_magnitude(add: float) -> None:
    """Also from fp16, which a package stores: softplus of what is had back is what is stored."""
    source, values = TensorSource("w", softplus=True, add=add, repeat=2), torch.tensor([-12.0, -0.7, 0.0, 3.0, 200.0])
    block = turned(values, source)
    assert torch.equal(block, (torch.nn.functional.softplus(values) + add).repeat_interleave(2))
    target = torch.zeros(5)
    put_back(target, block, source)
    # Its inverse takes a number of the size of 1 from `block`, whose roundings are all that is left of a small one.
    limits.numbers_agree(
        "softplus undone", target[1:], values[1:], limits.roundings("fp32", 4), size=values[1:].abs().clamp(min=1)
    )
    put_back(target, block.half().float(), source)
    limits.numbers_agree("softplus of it", turned(target, source), block.half().float(), limits.roundings("fp32", 4))


def test_a_magnitude_loses_nothing() -> None:
    """It is a power of two, and no value is over it."""
    values = torch.tensor([[0.3, -5.1], [0.0, 2.0]])
    assert (magnitude(values), magnitude(torch.zeros(2)), magnitude(torch.tensor([4.0]))) == (8.0, 1.0, 4.0)
    only = TensorSource("w", magnitude="only", repeat=3)
    assert turned(values, only).tolist() == [8.0] * 3


def test_blocks_lie_under_each_other_or_side_by_side() -> None:
    """Whichever the constant's shape says."""
    left, right = torch.ones(2, 3), torch.zeros(2, 3)
    assert torch.equal(assembled([left, right], (4, 3)), torch.cat([left, right]))
    assert torch.equal(assembled([left, right], (2, 6)), torch.cat([left, right], dim=1))
    assert assembled([left], (1, 2, 3)).shape == (1, 2, 3)
