"""One program: its arrays, the caches that the host keeps for it, its functions, and what Core ML is told of it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import tiny

from shardmill.errors import ShardmillError
from shardmill.models.architecture import SLIDING_MASK, Graph, LayerSpec
from shardmill.models.contract import GraphSpec, caches, new_name, new_rows, states
from shardmill.models.interface import FIXED, HOST, EntryPoints
from shardmill.models.part_kinds import inputs, interface
from shardmill.runtime import program as module
from shardmill.runtime.engine import Engine
from shardmill.runtime.kv import KVLayout
from shardmill.runtime.manifest import in_place
from shardmill.runtime.program import OWNED, Buffers, HostCaches, Program, free_retired


def test_an_input_has_one_array_for_each_shape_and_is_filled_anew() -> None:
    kept = Buffers()
    first = kept.filled("x", np.ones((1, 3, 4, 1), np.float32).transpose(0, 3, 1, 2))
    again = kept.filled("x", np.full((1, 1, 3, 4), 2.0, np.float64))
    assert again is first and (first == 2).all()
    assert kept.filled("x", np.ones((1, 1, 3, 1))) is not first and kept.filled("y", again) is not first


def test_the_native_module_takes_each_array_as_it_is() -> None:
    """fp32, in C order, writable: whatever was given."""
    given = np.arange(24, dtype=np.float16).reshape(1, 4, 6).T
    given.flags.writeable = False
    found = Buffers().filled("x", given)
    assert found.dtype == np.float32 and found.flags.c_contiguous and found.flags.writeable
    np.testing.assert_array_equal(found, given)


def test_the_arrays_outlive_their_program_for_as_long_as_core_ml_may_own_them(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    now = [start]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    kept = Buffers()
    array = weakref.ref(kept.filled("x", np.ones(3)))
    del kept
    gc.collect()
    now[0] = start + OWNED / 2
    free_retired()
    assert array() is not None
    now[0] = start + OWNED * 1.1
    free_retired()
    assert array() is None


SLOTS, WINDOW, RING = 64, 32, 32
GRAPH = Graph(hidden=8, heads=2, kv_heads=2, head_dim=4, rope_dim=4, ffn=8, rms_norm_eps=1e-5, conv_taps=3)
KINDS = (LayerSpec(), LayerSpec(mask=SLIDING_MASK), LayerSpec(mixer="conv"))
CALLS = EntryPoints(FIXED, (1, 4), HOST)
SPEC = GraphSpec("layers", GRAPH, tuple(enumerate(KINDS)), slots=SLOTS, window_slots=WINDOW, calls=CALLS)


def empty_caches() -> HostCaches:
    shapes = caches(SPEC)
    return HostCaches({name: new_name(name) for name in shapes}, shapes)  # type: ignore[arg-type]


@pytest.fixture
def held() -> HostCaches:
    return empty_caches()


def one_hot(slots: Sequence[int], count: int, rows: bool = False) -> Any:
    """A write mask [1, 1, count, T], or with its rows and columns exchanged."""
    mask = np.zeros((1, 1, count, len(slots)), np.float32)
    mask[0, 0, slots, np.arange(len(slots))] = 1
    return mask.transpose(0, 1, 3, 2) if rows else mask


def outputs(tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {name: [tokens if n == -1 else n for n in shape] for name, shape in new_rows(SPEC).items()}
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


def test_a_ring_gets_each_position_of_a_pass_into_its_own_slot() -> None:
    """Also of a recurrence's wide pass, which puts only its last block there, and of one that goes round the ring."""
    cache, sizes = (
        HostCaches({"c_2": "c_2_new"}, {"c_2": caches(SPEC)["c_2"]}),
        {"block": 8, "taps": 4, "narrow": 4},
    )
    layout = KVLayout(
        {"context": SLOTS, "rope": {}, "window": None, "window_slots": 0, "conv_taps": 0, "recurrent": sizes}
    )
    for start, count in ((0, 16), (16, 3), (19, 16), (35, 4)):
        at, made = range(start, start + count), outputs(count)
        cache.write(made, layout.arrays(list(at), list(at)))
        kept = [p for p in at if layout.ring[layout.ring_slots(p)] == p]
        assert kept[-1] == at[-1] and len(kept) >= min(count, 8)
        for p in kept:
            row = cache.arrays["c_2"][..., layout.ring_slots(p)]
            np.testing.assert_array_equal(row, made["c_2_new"][..., p - start])


def test_what_was_read_of_a_cache_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate compares what two ways to feed a text leave behind, and with Core ML the caches are written in place."""
    monkeypatch.setattr("shardmill.runtime.program.is_portable", lambda: False)
    held = empty_caches()
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


def test_the_contract_has_inputs_in_the_place_of_states() -> None:
    assert states(SPEC) == {} and list(caches(SPEC)) == ["k_0", "v_0", "k_1", "v_1", "c_2"]
    assert {name: inputs(SPEC)[name] for name in caches(SPEC)} == caches(SPEC)


def test_other_lengths_hold_what_both_reach_and_rings_all_of_it(held: HostCaches) -> None:
    """And nothing that was written before in a longer one."""
    masks = {"kv_write_mask": one_hot([3, 39, 50], SLOTS), "kv_write_mask_sliding": one_hot([3, 18, 31], WINDOW)}
    held.write(outputs(3), masks | {"conv_write_mask": one_hot([3, 18, 31], RING, rows=True)})
    before = {name: array.copy() for name, array in held.arrays.items()}
    assert before["k_0"][:, :, [39, 50]].all()
    shorter = caches(replace(SPEC, slots=40))
    held.resize(shorter)
    for name, array in held.arrays.items():
        assert array.shape == shorter[name] and array.dtype == before[name].dtype
        np.testing.assert_array_equal(array, before[name][:, :, : array.shape[2]])
    held.resize(caches(SPEC))
    for name, array in held.arrays.items():
        np.testing.assert_array_equal(array[:, :, :40], before[name][:, :, :40])
        assert array.shape == before[name].shape and not array[:, :, shorter[name][2] :].any()


@pytest.mark.parametrize("portable", [True, False])
def test_rings_stay_and_slots_go_along_when_the_context_changes(
    monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    """On Core ML caches are written in place, and an array is taken again at a length that was left before."""
    monkeypatch.setattr("shardmill.runtime.program.is_portable", lambda: portable)
    held = empty_caches()
    for array in held.arrays.values():
        array[...] = 1
    longer = {name: shape for name, shape in caches(replace(SPEC, slots=2 * SLOTS)).items()}
    for shapes in (longer, caches(SPEC), longer):
        held.resize(shapes)  # type: ignore[arg-type]
        for name, array in held.arrays.items():
            assert array.shape == tuple(shapes[name]) and array[:, :, : SLOTS if name in ("k_0", "v_0") else None].all()
    assert not held.arrays["k_0"][:, :, SLOTS:].any()


@dataclass
class Models:
    """Models that are never loaded.

    Attributes:
        told: what each one is loaded with, beside its path and compute units.
        passes: the inputs of each pass, after the caches, and the function.
    """

    told: list[dict[str, Any]] = field(default_factory=list)
    passes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    """Models whose outputs are their input x and, for caches, new rows that are 1 everywhere."""
    found = Models()

    class Model:
        def __init__(self, path: str, compute_units: ct.ComputeUnit, **named: Any) -> None:
            found.told.append(named)
            self.name = named.get("function_name", "")

        def make_state(self) -> None:
            """None."""

        def predict(self, given: dict[str, Any], state: None) -> dict[str, Any]:
            found.passes.append((self.name, given))
            tokens = given["x"].shape[2]
            rows = {name: [tokens if n == -1 else n for n in shape] for name, shape in new_rows(SPEC).items()}
            return {"hidden": given["x"]} | {name: np.ones(shape, np.float32) for name, shape in rows.items()}

    monkeypatch.setattr(ct.models, "MLModel", Model)
    return found


@pytest.fixture
def program(models: Models) -> Program:
    return Program(Path("part.mlpackage"), interface(SPEC))


def given(tokens: int) -> dict[str, Any]:
    """Random inputs of a pass, which write to the slots 3, 4 ..., whatever the ring."""
    rng, slots = np.random.default_rng(0), range(3, 3 + tokens)
    found: dict[str, Any] = {
        name: rng.random([tokens if n == -1 else n for n in shape], np.float32) + 1  # type: ignore[misc]
        for name, shape in inputs(SPEC).items()
        if name not in caches(SPEC)
    }
    rings = {"conv_write_mask": one_hot(slots, RING, rows=True), "kv_write_mask_sliding": one_hot(slots, WINDOW)}
    return found | rings | {"kv_write_mask": one_hot(slots, SLOTS)}


@pytest.mark.parametrize(("tokens", "function"), [(1, "t1"), (2, "t4"), (3, "t4"), (4, "t4")])
def test_the_narrowest_function_takes_a_pass_which_is_padded_with_its_last_token(
    program: Program, models: Models, tokens: int, function: str
) -> None:
    """Every write mask that a graph may have writes the padding nowhere."""
    inputs = given(tokens)
    result = program(inputs)
    np.testing.assert_array_equal(result, inputs["x"])
    ((name, padded),) = models.passes
    assert name == function == program.function(tokens)
    width = int(function[1:])
    for key, axis in (("x", 2), ("attn_mask", 2), ("conv_write_mask", 2), ("kv_write_mask", 3)):
        index = [min(t, tokens - 1) for t in range(width)]
        expected = inputs[key].take(index, axis)
        if "write" in key:
            expected[(slice(None),) * axis + (slice(tokens, None),)] = 0
        np.testing.assert_array_equal(padded[key], expected)
    assert not padded["kv_write_mask_sliding"][..., tokens:].any()
    assert program.held is not None and np.flatnonzero(program.kept("k_0").any(axis=(0, 1, 3))).tolist() == [
        *range(3, 3 + tokens)
    ]


def test_more_tokens_than_any_function_takes_are_refused(program: Program) -> None:
    with pytest.raises(ShardmillError, match="a pass of 5 tokens: the program takes 4 at most"):
        program(given(5))


def test_a_range_has_one_function_for_all_and_may_keep_its_caches(models: Models) -> None:
    plain = Program(Path("part.mlpackage"), interface(replace(SPEC, calls=EntryPoints())))
    assert not plain.functions and plain.function(3) == "" and plain.held is None
    assert Program(Path("head.mlpackage"), interface(GraphSpec("head", GRAPH, rows=8))).held is None


def load(build: tiny.Build, functions: dict[str, str], **changes: Any) -> None:
    manifest = in_place(build.plan, build.packages, build.table)
    parts = [{**part, "functions": functions} if functions else part for part in manifest["parts"]]
    Engine({**manifest, "parts": parts, **changes}, Path("/"))


@pytest.mark.parametrize("frequency", ["infrequent", "frequent"])
@pytest.mark.parametrize("functions", [{}, {"1": "", "4": ""}], ids=["range", "enumerated"])
def test_programs_of_flexible_shapes_have_the_hint(
    built: tiny.Build, models: Models, frequency: str, functions: dict[str, str]
) -> None:
    load(built, functions, reshape_frequency=frequency)
    hint = {"reshapeFrequency": ct.ReshapeFrequency[frequency.capitalize()]}
    assert models.told == [{"optimization_hints": hint}] * len(built.packages)


def test_programs_of_fixed_shapes_have_none(built: tiny.Build, models: Models) -> None:
    """Neither those that have a function for each width, nor an encoder's, which have one shape."""
    load(built, {"1": "t1", "4": "t4"}, reshape_frequency="frequent")
    assert models.told == [{"function_name": "t1"}, {"function_name": "t4"}] * len(built.packages)
    models.told.clear()
    Program(built.packages["head_0"], {"inputs": {}, "states": {}, "output": "logits"})
    assert models.told == [{}]
