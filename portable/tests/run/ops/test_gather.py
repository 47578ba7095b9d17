"""Gathers and scatters against numpy, and what each generation does with indices out of bounds."""

from __future__ import annotations

from typing import Any

import limits
import numpy as np
import pytest
import torch
from portable_coreml.errors import ExecutionError
from portable_coreml.run.ops import KERNELS

DATA = np.arange(12, dtype=np.float32).reshape(3, 4)
AT = {
    "update": lambda x, i, v: x.__setitem__(i, v),
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def run(kind: str, *arrays: np.ndarray, **plain: Any) -> np.ndarray:
    return KERNELS[kind].call(*(torch.from_numpy(a) for a in arrays), **plain).numpy()


@pytest.mark.parametrize("mode", sorted(AT))
def test_scatters_are_numpys_ufunc_at(mode: str) -> None:
    """Rows, elements along an axis, and points; repeated positions accumulate; negative ones count from the end."""
    rows, points = np.array([2, 0, -1]), np.array([[0, 1], [2, -1], [0, 1]])
    along = np.array([[0, 1, 2, -1], [1, 1, 0, 0]])
    if mode == "update":  # which of two values stays is not defined
        rows, points, along = rows[:2], points[:2], np.array([[0, 1, 2, -1], [1, 2, 0, 0]])
    rng = np.random.default_rng(0)
    for kind, index, where, shape in (
        ("scatter", rows, (rows,), (len(rows), 4)),
        ("scatter_nd", points, (points[:, 0], points[:, 1]), (len(points),)),
        ("scatter_along_axis", along, (along, np.broadcast_to(np.arange(4), along.shape)), along.shape),
    ):
        updates, wanted = rng.uniform(1, 20, shape).astype(np.float32), DATA.copy()
        AT[mode](wanted, where, updates)
        found = run(kind, DATA, index, updates, mode=mode)
        limits.numbers_agree(kind, found, wanted, limits.roundings("fp32", 2), size=np.abs(wanted))


def test_gathers_are_numpys_take() -> None:
    """Along an axis, per batch row, and by points, with indices that count from the end."""
    index = np.array([[1, -1], [0, 2]])
    np.testing.assert_array_equal(run("gather", DATA, index, axis=1), np.take(DATA, index, 1))
    batch = np.stack([DATA, -DATA])
    wanted = np.stack([row.take(i, 1) for row, i in zip(batch, index, strict=True)])
    np.testing.assert_array_equal(run("gather", batch, index, axis=2, batch_dims=1), wanted)
    np.testing.assert_array_equal(run("gather_nd", DATA, index), DATA[index[:, 0], index[:, 1]])
    np.testing.assert_array_equal(run("gather_along_axis", DATA, np.array([[0, 1, 2, -1]]), axis=0), [[0, 5, 10, 11]])


@pytest.mark.parametrize("kind", ["gather", "gather_along_axis", "gather_nd"])
def test_reads_out_of_bounds_are_refused_only_where_the_program_asks(kind: str) -> None:
    """iOS17 and later: with validate_indices an error, without it any element, never a crash; -1 is out of bounds."""
    for bad in (-1, 3, 1 << 40):
        index = np.array([[bad, 0]]) if kind == "gather_nd" else np.array([[0, bad, 0, 0]])
        with pytest.raises(ExecutionError, match="leave an axis of 3"):
            run(kind, DATA, index, validate_indices=True)
        assert np.isin(run(kind, DATA, index, validate_indices=False), DATA).all()


@pytest.mark.parametrize("kind", ["scatter", "scatter_along_axis", "scatter_nd"])
def test_writes_out_of_bounds_go_nowhere(kind: str) -> None:
    """iOS17 and later: the other writes of the operation arrive."""
    index = np.array([[3], [1], [-1]]) if kind == "scatter_nd" else np.array([3, 1, -1])
    if kind == "scatter_along_axis":
        index = np.repeat(index[:, None], 4, 1)
    updates, wanted = np.full((3, 4), 100, np.float32), DATA.copy()
    wanted[1] += 100
    np.testing.assert_array_equal(run(kind, DATA, index, updates, validate_indices=False), wanted)
    with pytest.raises(ExecutionError, match="-1 to 3"):
        run(kind, DATA, index, updates, validate_indices=True)
