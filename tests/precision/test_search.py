"""The search finds what trying every set of forms finds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.precision.search import EXACT, Table, best, front, smallest, summed

FORMS = ("fp16", "int8", "int4")


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, Table]:
    """Losses and sizes of up to five matrices; a form of fewer bytes never loses less.

    Losses are multiples of 1/64, so that every sum is exact and no limit is missed by rounding.
    """
    names = [f"m{i}" for i in range(draw(st.integers(1, 5)))]
    numbers = st.integers(1, 40)
    losses, sizes = {}, {}
    for name in names:
        step, rows = draw(numbers), draw(numbers)
        losses[name] = {"fp16": 0.0, "int8": step / 64, "int4": step / 64 + draw(numbers) / 8}
        sizes[name] = {"fp16": 4.0 * rows, "int8": 2.0 * rows, "int4": 1.0 * rows}
    return losses, sizes


def every(losses: Table, sizes: Table) -> list[tuple[float, float]]:
    """Loss and size of every set of forms."""
    return [
        (
            sum(losses[name][form] for name, form in zip(losses, forms, strict=True)),
            sum(sizes[name][form] for name, form in zip(losses, forms, strict=True)),
        )
        for forms in product(FORMS, repeat=len(losses))
    ]


@settings(max_examples=60)
@given(tables(), st.floats(0.0, 1.2))
def test_no_set_of_forms_is_better(table: tuple[Table, Table], share: float) -> None:
    losses, sizes = table
    limit = share * sum(forms["fp16"] for forms in sizes.values())
    within = [loss for loss, size in every(losses, sizes) if size <= limit]
    found = best(losses, sizes, limit)
    if not within:
        assert found is None
        return
    assert found is not None and found.size <= limit
    assert found.loss == pytest.approx(min(within), rel=1e-3)


@settings(max_examples=60)
@given(tables(), st.floats(0.0, 5.0))
def test_no_set_of_forms_is_smaller(table: tuple[Table, Table], most: float) -> None:
    losses, sizes = table
    within = [size for loss, size in every(losses, sizes) if loss <= most]
    found = smallest(losses, sizes, most)
    assert within and found is not None and found.loss <= most * (1 + EXACT)
    assert found.size == pytest.approx(min(within), rel=1e-3)


@pytest.mark.parametrize(("seed", "count"), [(0, 9), (5, 9), (1, 24)])
def test_a_limit_is_kept_to_the_last_byte(seed: int, count: int) -> None:
    """Of large models, too, where a set over it by a millionth is what the solver takes for one that keeps to it."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(1e8, 1e9, count).tolist()
    bits = {"int4": 4.0, "palette6": 6.0, "int8": 8.0}
    sizes = {f"m{i}": {name: each * n for name, each in bits.items()} for i, n in enumerate(numbers)}
    shares = {"int4": 1e-12, "palette6": 1e-13, "int8": 1e-14}
    losses = {path: {name: shares[name] * size for name, size in row.items()} for path, row in sizes.items()}
    near = {path: rng.choice([*row]) for path, row in sizes.items()}
    for solve, table, limit in (
        (best, sizes, summed(sizes, near) - 1),
        (smallest, losses, summed(losses, near) * (1 - 1e-9)),
    ):
        found = solve(losses, sizes, limit)
        assert found is not None and summed(table, found.forms) <= limit


@settings(max_examples=30)
@given(tables())
def test_the_front_is_monotone_and_ends_at_no_loss(table: tuple[Table, Table]) -> None:
    losses, sizes = table
    found = front(losses, sizes, 9)
    assert all(a.size < b.size and a.loss > b.loss for a, b in zip(found, found[1:], strict=False))
    assert found[-1].loss == 0
    assert found[0].size == pytest.approx(sum(min(forms.values()) for forms in sizes.values()))
