"""Palettes by what inputs weigh: the best tables there are for the weights, and the nearest entry for each number."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from shardmill.convert import palette
from shardmill.forms.form import form
from shardmill.precision.quantisers import error, palettised

ROWS, COLUMNS = 32, 48


def draw(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights, and H of correlated inputs, some of them large."""
    at = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=at)
    x = torch.randn(300, COLUMNS, generator=at) * torch.linspace(0.05, 3, COLUMNS)
    return weight, x.T @ x


def unweighed(weight: Tensor, bits: int) -> Tensor:
    """As conversion makes a palette of its own, for the whole matrix."""
    half = weight.half().numpy()
    entries = palette.palette_table(palette.histogram(half), 2**bits)
    return torch.from_numpy(entries[palette.indices(entries, half.ravel())].reshape(half.shape)).float()


@pytest.mark.parametrize("name", ["palette4", "palette6", "palette8", "palette4/8", "palette6/16"])
def test_each_number_has_the_nearest_entry_of_its_table(name: str) -> None:
    weight, h = draw()
    found, wanted = palettised(weight, form(name), h.diagonal()), form(name)
    assert found.codes.dtype == torch.uint8 and found.lut.dtype == torch.float16
    assert found.lut.shape == (wanted.tables(ROWS), 2**wanted.bits) and int(found.codes.max()) < 2**wanted.bits
    tables = found.lut.float().repeat_interleave(ROWS // len(found.lut), dim=0)  # of each row
    distance = (weight.half().float()[:, :, None] - tables[:, None, :]).abs()
    own = distance.gather(2, found.codes.long()[:, :, None])[:, :, 0]
    assert torch.equal(own, distance.amin(dim=2))
    assert torch.equal(found.values, tables.gather(1, found.codes.long()))


@pytest.mark.parametrize("seed", range(3))
def test_weighed_tables_err_less_where_it_counts_and_groups_less_still(seed: int) -> None:
    weight, h = draw(seed)
    diagonal = h.diagonal().diag()  # what the tables are weighed by
    plain = error(weight, unweighed(weight, 4), diagonal)
    weighed, grouped = (
        error(weight, palettised(weight, form(n), h.diagonal()).values, diagonal) for n in ("palette4", "palette4/8")
    )
    assert grouped < weighed < 0.97 * plain


def test_no_other_table_errs_less() -> None:
    """Compared with every way to cut 18 numbers, in their order, into 16 clusters."""
    numbers = torch.tensor(
        [-3.0, -2.5, -1.0, -0.9, 0.0, 0.1, 0.7, 1.5, 1.6, 2.0, 2.1, 2.2, 3.0, 3.3, 4.0, 4.1, 5.0, 6.0]
    )
    weigh = torch.linspace(1, 2, len(numbers))
    found = palettised(numbers[None], form("palette4"), weigh)
    damped = weigh.double() + 0.01 * weigh.double().mean()
    own = float((damped * (found.values[0] - numbers.half().float()).double().square()).sum())
    least = min(cut_error(numbers.half().double(), damped, cuts) for cuts in combinations(range(1, len(numbers)), 15))
    assert own == pytest.approx(least, rel=1e-2)  # entries are rounded to fp16


def cut_error(numbers: Tensor, weigh: Tensor, cuts: tuple[int, ...]) -> float:
    """The weighed squared error of clusters, each at its mean."""
    total = 0.0
    for start, end in zip((0, *cuts), (*cuts, len(numbers)), strict=True):
        x, w = numbers[start:end], weigh[start:end]
        total += float((w * (x - (w * x).sum() / w.sum()).square()).sum())
    return total


def test_few_numbers_are_kept_as_they_are_and_unseen_inputs_do_not_matter() -> None:
    weight = torch.tensor([[0.5, -0.0, 0.0, 1.0], [0.5, 1.0, -2.0, 0.0]])
    for weigh in (None, torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 2.0])):
        found = palettised(weight, form("palette4"), weigh)
        assert torch.equal(found.values, weight.abs() * weight.sign()) and found.lut[0, -1] == 1.0


THREADS = """
import hashlib, sys, torch
from shardmill.forms.form import form
from shardmill.precision.quantisers import palettised
torch.set_num_threads(int(sys.argv[1]))
at = torch.Generator().manual_seed(3)
found = palettised(torch.randn(256, 512, generator=at), form("palette6/32"), torch.rand(512, generator=at))
print(hashlib.sha256(found.codes.numpy().tobytes() + found.lut.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_any_number_of_threads_gives_the_same_bits() -> None:
    told = [
        subprocess.run([sys.executable, "-c", THREADS, count], capture_output=True, text=True, check=True).stdout
        for count in ("1", "2")
    ]
    assert told[0] == told[1] and len(told[0].strip()) == 64


def test_a_number_of_zeros_is_no_table_of_nothing() -> None:
    found = palettised(torch.zeros(4, 4), form("palette4/2"), torch.ones(4))
    assert found.values.abs().max() == 0 and np.isfinite(found.lut.numpy()).all()
