"""Which function takes a pass, and what a pass is filled up with."""

from __future__ import annotations

import numpy as np
import pytest

from shardmill.errors import ShardmillError
from shardmill.models.architecture import SLIDING_MASK, Graph, LayerSpec
from shardmill.models.contract import GraphSpec
from shardmill.models.interface import FIXED, GRAPH, RANGE, EntryPoints, calls
from shardmill.runtime.functions import Functions, of_blueprint, of_entry

ENTRY = {
    "inputs": {"x": [1, 8, "T", 1], "attn_mask": [1, 1, "T", 6], "kv_write_mask": [1, 1, 6, "T"]},
    "functions": {"1": "t1", "4": "t4"},
}


@pytest.fixture
def functions() -> Functions:
    found = of_entry(ENTRY)
    assert found is not None
    return found


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (2, 4), (3, 4), (4, 4)])
def test_the_narrowest_that_takes_a_pass_takes_it(functions: Functions, tokens: int, width: int) -> None:
    assert functions.width(tokens) == width


def test_more_tokens_than_any_takes_are_refused(functions: Functions) -> None:
    with pytest.raises(ShardmillError, match="a pass of 5 tokens: the program takes 4 at most"):
        functions.width(5)


def test_a_pass_is_filled_up_with_its_last_token_which_is_written_nowhere(functions: Functions) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 8, 2, 1), "attn_mask": (1, 1, 2, 6), "kv_write_mask": (1, 1, 6, 2)}
    given = {name: rng.random(shape, np.float32) + 1 for name, shape in shapes.items()}
    assert functions.tokens(given) == 2
    filled = functions.filled(given, 4)
    assert {name: array.shape[functions.axes[name]] for name, array in filled.items()} == dict.fromkeys(shapes, 4)
    np.testing.assert_array_equal(filled["x"][0, :, :, 0].T, given["x"][0, :, [0, 1, 1, 1], 0])
    np.testing.assert_array_equal(filled["attn_mask"][0, 0], given["attn_mask"][0, 0, [0, 1, 1, 1]])
    np.testing.assert_array_equal(filled["kv_write_mask"][0, 0, :, :2], given["kv_write_mask"][0, 0])
    assert not filled["kv_write_mask"][0, 0, :, 2:].any()
    assert functions.filled(given, 2)["x"] is given["x"]


def test_the_contract_and_the_manifest_say_the_same() -> None:
    """Every write mask that a graph may have is known by its name's beginning."""
    graph = Graph(hidden=8, heads=1, kv_heads=1, head_dim=4, rope_dim=4, ffn=8, rms_norm_eps=1e-5, conv_taps=3)
    kinds = (LayerSpec(), LayerSpec(mask=SLIDING_MASK), LayerSpec(mixer="conv"))
    blueprint = GraphSpec("layers", graph, tuple(enumerate(kinds)), slots=64, window_slots=32)
    found = of_blueprint(blueprint, EntryPoints(FIXED, (1, 4)))
    assert found is not None and found.names == {1: "t1", 4: "t4"}
    assert found.axes["kv_write_mask_sliding"] == 3 and found.axes["conv_write_mask"] == 2
    ones = {name: np.ones([2 if i == axis else 1 for i in range(4)], np.float32) for name, axis in found.axes.items()}
    padded = {name for name, array in found.filled(ones, 4).items() if array.sum() < 4}
    assert padded == {"kv_write_mask", "kv_write_mask_sliding", "conv_write_mask"}


def test_a_range_has_one_function_for_all() -> None:
    assert of_entry({"inputs": ENTRY["inputs"]}) is None
    assert calls(RANGE, GRAPH, (1, 4)) == EntryPoints()
    assert of_blueprint(GraphSpec("head", Graph(8, 1, 1, 4, 4, 8, 1e-5)), EntryPoints()) is None
