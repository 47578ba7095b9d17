"""The masked cache write in place: what it leaves is what its formula gives, whatever the numbers and the run."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from portable_coreml.files.read_text import read_text
from portable_coreml.program import Value
from portable_coreml.run.execute import Executable
from portable_coreml.run.observe import trace

SLOTS, WIDTH = 5, 3
INF, NAN = float("inf"), float("nan")


def program(precision: str, transposed: bool = False) -> Executable:
    """k * (1 - sum(mask)) + mask @ new, written to the state k [1, SLOTS, WIDTH], in the type of the precision."""
    kind, one = precision, "fp16(0x1p+0)" if precision == "fp16" else "fp32(0x1p+0)"
    state, new = f"tensor<{kind}, [1, {SLOTS}, {WIDTH}]>", f"[1, {WIDTH}, ?]" if transposed else f"[1, ?, {WIDTH}]"
    column, turned = f"tensor<{kind}, [1, {SLOTS}, 1]>", str(transposed).lower()
    text = f"""program(1.3){{ func main<ios18>(state<{state}> k, tensor<{kind}, [1, {SLOTS}, ?]> mask,
        tensor<{kind}, {new}> new) {{
        {state} old = read_state(input = k);
        {column} s = reduce_sum(axes = tensor<int32, [1]>([-1]), keep_dims = bool(true), x = mask);
        {column} keep = sub(x = {one}, y = s);
        {state} kept = mul(x = old, y = keep);
        {state} rows = matmul(transpose_x = bool(false), transpose_y = bool({turned}), x = mask, y = new);
        {state} sum = add(x = kept, y = rows); write_state(data = sum, input = k);
        {state} y = read_state(input = k); }} -> (y); }}"""

    def load(value: Value) -> np.ndarray:
        assert isinstance(value.data, np.ndarray)
        return value.data

    return Executable(read_text(text).functions["main"], load, precision)


def one_hot(*rows: int) -> torch.Tensor:
    return torch.eye(SLOTS)[:, list(rows)][None]  # [1, S, T]


def formula(state: torch.Tensor, mask: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """In IEEE arithmetic, as a device computes it: 0 * inf is NaN."""
    products = (mask[..., None] * new[:, None]).sum(2)  # [1, S, T, 1] * [1, 1, T, D] -> [1, S, D]
    return state * (1 - mask.sum(-1, keepdim=True)) + products


def filled(**cells: float) -> torch.Tensor:
    """A state of small numbers, but for `r<row>c<column>`."""
    state = torch.arange(SLOTS * WIDTH, dtype=torch.float32).reshape(1, SLOTS, WIDTH) / 8
    for cell, value in cells.items():
        state[0, int(cell[1]), int(cell[3])] = value
    return state


ROWS = {
    "one token": [[1.0, 2.0, 3.0]],
    "an overflow": [[1.0, INF, 3.0]],
    "a negative overflow": [[-INF, 2.0, 3.0]],
    "NaN": [[1.0, 2.0, NAN]],
    "two tokens": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
    "two, the second overflows": [[1.0, 2.0, 3.0], [4.0, INF, 6.0]],
    "two that cancel out": [[1.0, INF, 3.0], [4.0, -INF, 6.0]],
}
STATES = {
    "sound": filled(),
    "overflown in a written row": filled(r1c0=INF, r3c2=-INF),
    "NaN in a written row": filled(r1c1=NAN),
    "broken in a row that stays": filled(r0c0=INF, r4c2=NAN),
}


WAYS = [*product(["fp16", "fp32"], [False, True], [(1, 2), (3, 1)])]  # precision, turned or not, neighbours or a gap
CASES = list(product(sorted(STATES), sorted(ROWS)))


@pytest.mark.parametrize(
    ("state", "new", "precision", "transposed", "slots"),
    [(*case, *way) for case, way in zip(CASES, random.Random(0).choices(WAYS, k=len(CASES)), strict=True)],
)
def test_every_run_leaves_what_the_formula_gives(
    state: str, new: str, precision: str, transposed: bool, slots: tuple[int, ...]
) -> None:
    """The first run at a shape is interpreted, later ones are plans, and an observed one is interpreted again."""
    rows = torch.tensor([ROWS[new]])  # [1, T, D]
    mask = one_hot(*slots[: rows.shape[1]])
    expected = formula(STATES[state], mask, rows)
    made, given = program(precision, transposed), {"mask": mask, "new": rows.mT if transposed else rows}
    found = {}
    for run in ("first", "later", "observed"):
        states = {"k": STATES[state].clone()}
        if run == "observed":
            with trace(lambda *_: None):
                made.run(given, states)
        else:
            made.run(given, states)
        found[run] = states["k"]
    for run, left in found.items():
        np.testing.assert_array_equal(left.numpy(), expected.numpy(), err_msg=run)


def test_an_overflow_stays_for_good() -> None:
    """A rejected token that overflowed is not healed by the one that takes its slot: on a device it is not either."""
    made, state = program("fp16"), {"k": filled()}
    for row in (INF, 1.0, 2.0):
        made.run({"mask": one_hot(2), "new": torch.full((1, 1, WIDTH), row)}, state)
    assert torch.isnan(state["k"]).all()


@pytest.mark.parametrize("slots", [(1,), (1, 2), (3, 1)], ids=["one", "neighbours", "with a gap"])
def test_finite_rows_are_written_in_place(slots: tuple[int, ...]) -> None:
    """That is the point of it: only T rows are touched. A mask that is not one-hot takes the formula."""
    made, states = program("fp16"), {"k": filled()}
    given = {"mask": one_hot(*slots), "new": torch.ones(1, len(slots), WIDTH)}
    made.run(given, states)
    before = states["k"]
    made.run(given, states)
    assert states["k"] is before
    made.run({**given, "mask": given["mask"] / 2}, states)
    assert states["k"] is not before
    np.testing.assert_array_equal(states["k"], formula(before, given["mask"] / 2, given["new"]))


BAD_MASKS = {
    "a column of none": torch.zeros(1, SLOTS, 1),
    "two rows in a column": one_hot(1) + one_hot(2),
    "a row twice": one_hot(2, 2),
    "a weight": one_hot(1) * 0.5,
    "NaN": one_hot(1) + torch.tensor([[[0.0], [0.0], [NAN], [0.0], [0.0]]]),
    "a negative": one_hot(1) - one_hot(3) * 0.25,
}


@pytest.mark.parametrize("what", sorted(BAD_MASKS))
def test_a_mask_that_is_not_one_hot_takes_the_formula(what: str) -> None:
    mask = BAD_MASKS[what]
    new = torch.ones(1, mask.shape[-1], WIDTH)
    made, states = program("fp32"), {"k": filled()}
    made.run({"mask": one_hot(*range(mask.shape[-1])), "new": new}, {"k": filled()})  # the plan is made here
    made.run({"mask": mask, "new": new}, states)
    np.testing.assert_array_equal(states["k"], formula(filled(), mask, new))
