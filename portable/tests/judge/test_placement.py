"""Predicted cost: shares that add up, and arithmetic and bytes counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from portable_coreml.compute_plan import costs
from portable_coreml.files.bundle import compile_model, load_model
from portable_coreml.files.read_text import read_text
from portable_coreml.judge.placement import (
    BYTES_PER_SECOND,
    OPERATIONS_PER_SECOND,
    arithmetic_operations,
    cost_shares,
    work,
)
from portable_coreml.judge.rule import Subject, Target
from portable_coreml.judge.shapes import infer_shapes

PROGRAM = """program(1.3){ func main<ios18>(tensor<fp16, [1, 64, ?, 1]> x) {
    tensor<fp16, [32, 64, 1, 1]> w = constexpr_blockwise_shift_scale(data = tensor<int8, [32, 64, 1, 1]>(
        BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64(64))),
        scale = tensor<fp16, [32, 1, 1, 1]>(BLOBFILE(path = string("@model_path/weights/weight.bin"),
        offset = uint64(4096))));
    tensor<fp16, [1, 32, ?, 1]> c = conv(weight = w, x = x);
    tensor<fp16, [1, 32, ?]> s = squeeze(axes = tensor<int32, [1]>([3]), x = c);
    bool yes = const()[val = bool(true)];
    tensor<fp16, [1, ?, ?]> m = matmul(transpose_x = yes, x = s, y = s);
    tensor<fp16, [1, ?, ?]> e = exp(x = m);
} -> (e); }"""


def subject(text: str) -> Subject:
    function = read_text(text).functions["main"]
    return Subject(function, (), (), 9, 1, 0, Target())


def test_shares_add_up_to_one() -> None:
    """Every operation with a device has a share, views none of the work."""
    made = subject(PROGRAM)
    shares = cost_shares(made, infer_shapes(made.function, {"x": (1, 64, 4, 1)}))
    assert sum(shares.values()) == pytest.approx(1)
    assert set(shares) == {"c", "s", "m", "e"}
    assert shares["s"] == 0 < shares["e"] < shares["c"]


def test_arithmetic_and_bytes_are_counted_by_hand() -> None:
    """A 64 -> 32 projection and a product over 32 channels, at 4 tokens; weights count in int8."""
    made = subject(PROGRAM)
    shapes = infer_shapes(made.function, {"x": (1, 64, 4, 1)})
    ops = {op.outputs[0].name: op for op in made.runtime_ops}
    assert arithmetic_operations(made, ops["c"], shapes) == 2 * 32 * 64 * 4
    assert arithmetic_operations(made, ops["m"], shapes) == 2 * 4 * 4 * 32
    assert arithmetic_operations(made, ops["e"], shapes) == 16
    moved = (64 * 4 + 32 * 4) * 2 + 32 * 64 + 32 * 2  # x and c in fp16, w in int8, its scales in fp16
    wanted = max(moved / BYTES_PER_SECOND, 2 * 32 * 64 * 4 / OPERATIONS_PER_SECOND)
    assert work(made, shapes)["c"].seconds == pytest.approx(wanted)


def test_attention_is_both_of_its_products() -> None:
    """Two heads, three queries on six keys of 16 and values of 8."""
    made = subject("""program(1.3){ func main<ios18>(tensor<fp16, [1, 2, 3, 16]> q, tensor<fp16, [1, 2, 6, 16]> k,
        tensor<fp16, [1, 2, 6, 8]> v) {
        tensor<fp16, [1, 2, 3, 8]> a = scaled_dot_product_attention(key = k, query = q, value = v);
    } -> (a); }""")
    shapes = infer_shapes(made.function, {"q": (1, 2, 3, 16), "k": (1, 2, 6, 16), "v": (1, 2, 6, 8)})
    (op,) = made.runtime_ops
    assert arithmetic_operations(made, op, shapes) == 2 * 2 * 3 * 6 * (16 + 8)


def test_a_recurrent_layer_multiplies_with_all_its_weights_at_each_step() -> None:
    """Five steps of a batch of two, from 3 features to 4, with four gates."""
    made = subject("""program(1.3){ func main<ios17>(tensor<fp32, [5, 2, 3]> x, tensor<fp32, [2, 4]> h,
        tensor<fp32, [2, 4]> c, tensor<fp32, [16, 3]> i, tensor<fp32, [16, 4]> r) {
        tensor<fp32, [1, 2, 4]> y, tensor<fp32, [2, 4]> yh, tensor<fp32, [2, 4]> yc = lstm(initial_c = c, initial_h = h,
            weight_hh = r, weight_ih = i, x = x);
    } -> (y); }""")
    (op,) = made.runtime_ops
    shapes = {"x": (5, 2, 3), "h": (2, 4), "c": (2, 4), "i": (16, 3), "r": (16, 4), "y": (1, 2, 4)}
    assert arithmetic_operations(made, op, shapes) == 2 * 5 * 2 * 16 * (3 + 4)


def test_no_share_is_told_where_shapes_depend_on_data() -> None:
    text = PROGRAM.replace("e = exp(x = m)", "e = exp(x = m); tensor<int32, [?, 3]> z = non_zero(x = e)")
    made = subject(text)
    assert cost_shares(made, infer_shapes(made.function, {"x": (1, 64, 4, 1)})) == {}


def test_a_bundle_costs_what_its_package_does(attention_package: Path, tmp_path: Path) -> None:
    """State writes included; the projections of the contract's attention are not the least of it."""
    bundle = compile_model(attention_package, tmp_path / "m.mlmodelc")
    first, second = (costs(load_model(path)) for path in (attention_package, bundle))
    assert first == second
    assert sum(first.values()) == pytest.approx(1)
    assert first["main", "hidden"] > 0 < first["main", "cache_k"]
