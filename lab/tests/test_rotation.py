"""The rotation is orthogonal, mixes every channel with all others, and comes out the same everywhere."""

from __future__ import annotations

import hashlib

import limits
import pytest
import torch
from shardmill_lab.rotate import rotated, rotated_outputs

WIDTHS = (1, 6, 15, 64, 96, 640, 896, 1024)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_orthogonal(width: int) -> None:
    q = rotated(torch.eye(width)).double()
    limits.numbers_agree("Q^T Q", q.T @ q, torch.eye(width), limits.sums("fp64", width))


@pytest.mark.parametrize("width", [64, 96, 896])
def test_outputs_are_rotated_as_the_stream_is(width: int) -> None:
    """(W x) Q must be what Q^T W gives for x."""
    drawn = torch.Generator().manual_seed(0)
    matrix, x = torch.randn(width, 5, generator=drawn), torch.randn(3, 5, generator=drawn)
    limits.rows_agree("outputs", rotated(x @ matrix.T), x @ rotated_outputs(matrix).T, limits.sums("fp32", width, 2))


@pytest.mark.parametrize("width", [96, 640, 896, 1024])
def test_one_loud_channel_spreads_over_all(width: int) -> None:
    """In one block only it would stay within the block, which is what P is there for."""
    loud = torch.zeros(1, width)
    loud[0, width // 3] = 1.0
    found = rotated(loud)[0].abs()
    assert float(found.max()) < 6 / width**0.5
    assert float((found > 0).float().mean()) > 0.5


def test_the_same_bits_everywhere() -> None:
    """Each step is one operation on two numbers, so that no library's order of sums shows."""
    numbers = (torch.arange(3 * 96, dtype=torch.float32).view(3, 96) % 37 - 18) / 7
    digest = hashlib.sha256(rotated(numbers).numpy().tobytes()).hexdigest()
    assert digest == "787c3b2a11ab3101566f6772e9eee8f6332776051b2fc53c70ecf116155307bd"


def test_many_rows_are_as_one() -> None:
    """Blocks of rows are a matter of memory."""
    rows = torch.randn(5000, 24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rotated(rows)[4990:], rotated(rows[4990:]))
