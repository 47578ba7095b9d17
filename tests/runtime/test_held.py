"""The caches that the host keeps: what a pass gives goes where its masks say, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardmill.models.architecture import SLIDING_MASK, Graph, LayerSpec
from shardmill.models.contract import GraphSpec, caches, inputs, new_rows, states
from shardmill.runtime.functions import HostCaches, held_by_blueprint, held_by_entry
from shardmill.runtime.program import Program

SLOTS, WINDOW, RING = 64, 32, 32
GRAPH = Graph(hidden=8, heads=2, kv_heads=2, head_dim=4, rope_dim=4, ffn=8, rms_norm_eps=1e-5, conv_taps=3)
KINDS = (LayerSpec(), LayerSpec(mask=SLIDING_MASK), LayerSpec(mixer="conv"))
BLUEPRINT = GraphSpec("layers", GRAPH, tuple(enumerate(KINDS)), slots=SLOTS, window_slots=WINDOW, hosted=True)


@pytest.fixture
def held() -> HostCaches:
    found = held_by_blueprint(BLUEPRINT)
    assert found is not None
    return found


def one_hot(slots: Sequence[int], count: int, rows: bool = False) -> Any:
    """A write mask [1, 1, count, T], or with its rows and columns exchanged."""
    mask = np.zeros((1, 1, count, len(slots)), np.float32)
    mask[0, 0, slots, np.arange(len(slots))] = 1
    return mask.transpose(0, 1, 3, 2) if rows else mask


def outputs(tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {name: [tokens if n == -1 else n for n in shape] for name, shape in new_rows(BLUEPRINT).items()}
    return {name: rng.random(shape, np.float32) + 1 for name, shape in shapes.items()}


def test_each_cache_is_written_by_the_mask_of_its_layer(held: HostCaches) -> None:
    """Slots in any order; rows beyond the masks' tokens, which a pass was filled up with, are left out."""
    slots, ring, taps = [40, 3], [8, 9], [30, 31]
    masks = {"kv_write_mask": one_hot(slots, SLOTS), "kv_write_mask_sliding": one_hot(ring, WINDOW)}
    given, made = masks | {"conv_write_mask": one_hot(taps, RING, rows=True)}, outputs(4)
    held.write(made, given)
    for name, at in (("k_0", slots), ("v_0", slots), ("k_1", ring), ("v_1", ring)):
        np.testing.assert_array_equal(held.arrays[name][:, :, at], made[f"{name}_new"][:, :, :2])
        assert np.count_nonzero(held.arrays[name].any(axis=(0, 1, 3))) == 2
    np.testing.assert_array_equal(held.arrays["c_2"][..., taps], made["c_2_new"][..., :2])
    assert np.count_nonzero(held.arrays["c_2"].any(axis=(0, 1, 2))) == 2
    held.forget()
    assert not any(array.any() for array in held.arrays.values())


def test_what_was_read_of_a_cache_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate compares what two ways to feed a text leave behind, and with Core ML the caches are written in place."""
    monkeypatch.setattr("shardmill.runtime.functions.is_portable", lambda: False)
    held = held_by_blueprint(BLUEPRINT)
    assert held is not None
    program = object.__new__(Program)
    program.held = held
    masks = {"kv_write_mask": one_hot([3], SLOTS), "kv_write_mask_sliding": one_hot([3], WINDOW)}
    given = masks | {"conv_write_mask": one_hot([3], RING, rows=True)}
    held.write(outputs(1), given)
    before = program.kept("k_0")
    expected = before.copy()
    held.forget()
    held.write({name: rows + 1 for name, rows in outputs(1).items()}, given)
    assert before.any() and np.array_equal(before, expected) and not np.array_equal(program.kept("k_0"), expected)


def test_the_contract_has_inputs_in_the_place_of_states(held: HostCaches) -> None:
    """The manifest says the same of them."""
    assert states(BLUEPRINT) == {} and list(caches(BLUEPRINT)) == ["k_0", "v_0", "k_1", "v_1", "c_2"]
    assert {name: inputs(BLUEPRINT)[name] for name in caches(BLUEPRINT)} == caches(BLUEPRINT)
    entry = {"inputs": {name: list(shape) for name, shape in inputs(BLUEPRINT).items()}, "written": held.written}
    found = held_by_entry(entry)
    assert found is not None and found.shapes == held.shapes == caches(BLUEPRINT)
    assert held_by_entry({"inputs": entry["inputs"]}) is None
    assert held_by_blueprint(GraphSpec("head", GRAPH, rows=8, hosted=True)) is None


def test_other_lengths_hold_what_both_reach_and_rings_all_of_it(held: HostCaches) -> None:
    """And nothing that was written before in a longer one."""
    masks = {"kv_write_mask": one_hot([3, 50], SLOTS), "kv_write_mask_sliding": one_hot([3, 18], WINDOW)}
    held.write(outputs(2), masks | {"conv_write_mask": one_hot([3, 18], RING, rows=True)})
    before = {name: array.copy() for name, array in held.arrays.items()}
    assert before["k_0"][:, :, 50].all()
    shorter = caches(replace(BLUEPRINT, slots=40))
    held.resize(shorter)
    for name, array in held.arrays.items():
        assert array.shape == shorter[name] and array.dtype == before[name].dtype
        np.testing.assert_array_equal(array, before[name][:, :, : array.shape[2]])
    held.resize(caches(BLUEPRINT))
    for name, array in held.arrays.items():
        np.testing.assert_array_equal(array[:, :, :40], before[name][:, :, :40])
        assert array.shape == before[name].shape and not array[:, :, shorter[name][2] :].any()


@pytest.mark.parametrize("portable", [True, False])
def test_rings_stay_and_slots_go_along_when_the_context_changes(
    monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    """On Core ML caches are written in place, and an array is taken again at a length that was left before."""
    monkeypatch.setattr("shardmill.runtime.functions.is_portable", lambda: portable)
    held = held_by_blueprint(BLUEPRINT)
    assert held is not None
    for array in held.arrays.values():
        array[...] = 1
    longer = {name: shape for name, shape in caches(replace(BLUEPRINT, slots=2 * SLOTS)).items()}
    for shapes in (longer, caches(BLUEPRINT), longer):
        held.resize(shapes)  # type: ignore[arg-type]
        for name, array in held.arrays.items():
            assert array.shape == tuple(shapes[name]) and array[:, :, : SLOTS if name in ("k_0", "v_0") else None].all()
    assert not held.arrays["k_0"][:, :, SLOTS:].any()
