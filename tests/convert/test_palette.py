"""Tables of palettes: close to the best there are, and the same whatever order the numbers come in."""

from __future__ import annotations

import limits
import numpy as np
import pytest
from coremltools.models.neural_network.quantization_utils import _get_kmeans_lookup_table_and_weight
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.convert.palette import histogram, indices, palette_table


def drawn(kind: str, count: int) -> np.ndarray:
    random = np.random.default_rng(5)
    shape = {
        "normal": random.standard_normal,
        "heavy tails": lambda n: random.standard_t(3, n),
        "uniform": lambda n: random.uniform(-1, 1, n),
    }[kind]
    return (0.02 * shape(count)).astype(np.float16)


def error(values: np.ndarray, entries: np.ndarray) -> float:
    distances = np.abs(values.astype(np.float64)[:, None] - entries.astype(np.float64)).min(1)
    return float((distances**2).sum())


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "uniform"])
def test_error_is_near_that_of_coremltools_optimal_k_means(kind: str, bits: int) -> None:
    """coremltools' kmeans1d finds the best table there is; a uniform grid would be 2 to 30 times worse with tails."""
    values = drawn(kind, 20_000)
    best, _ = _get_kmeans_lookup_table_and_weight(bits, values, force_kmeans1d=True)
    found = error(values, palette_table(histogram(values), 2**bits))
    assert 0.999 < found / error(values, best.astype(np.float16)) < 1.15


@given(st.permutations(range(300)), st.sampled_from([16, 64, 256]))
@settings(max_examples=20)
def test_order_does_not_count(order: list[int], entries: int) -> None:
    values = drawn("normal", 300)
    assert np.array_equal(palette_table(histogram(values[order]), entries), palette_table(histogram(values), entries))


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=400), st.sampled_from([16, 64]))
@settings(max_examples=100)
def test_every_number_gets_the_nearest_entry(bits: list[int], entries: int) -> None:
    values = np.array(bits, np.uint16).view(np.float16)
    values = np.append(values[np.isfinite(values)], np.float16(1))
    found = palette_table(histogram(values), entries)
    assert found.dtype == np.float16 and found.shape == (entries,) and np.isfinite(found).all()
    assert (np.diff(found.astype(np.float64)) >= 0).all()
    distances = np.abs(values.astype(np.float64)[:, None] - found.astype(np.float64))
    chosen = indices(found, values)
    assert np.array_equal(distances[np.arange(len(values)), chosen], distances.min(1))
    assert np.array_equal(indices(found, np.tile(values, 70_000 // len(values) + 1))[: len(values)], chosen)
    if len(np.unique(values)) <= entries:  # 0 and -0 are one
        assert not distances.min(1).any()


def test_of_two_entries_at_one_distance_the_smaller_is_taken() -> None:
    entries = np.array([0, 1, 3], np.float16)
    values = np.array([-5, 0.5, 0.501, 2, 9], np.float16)
    assert indices(entries, values).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("entries", [16, 64])
def test_every_entry_is_the_mean_of_its_numbers(entries: int) -> None:
    """What k-means ends with, to the rounding of entries to fp16."""
    values = drawn("normal", 20_000)
    found = palette_table(histogram(values), entries)
    chosen, exact = indices(found, values), values.astype(np.float64)
    means = np.array([exact[chosen == i].mean() for i in range(entries)])
    # An entry is rounded, and numbers between two entries may fall to the other one then.
    limits.numbers_agree("entries", found, means, limits.roundings("fp16", 2))
