"""Shapes without computing: what follows from the inputs' shapes, and what depends on data."""

from __future__ import annotations

from pathlib import Path

import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files.bundle import load_model
from portable_coreml.files.read_text import read_text
from portable_coreml.judge.shapes import infer_shapes
from portable_coreml.proxy import MLModelProxy
from portable_coreml.run.observe import trace

from tests.conftest import step_inputs


@pytest.mark.parametrize("tokens", [1, 3])
def test_inferred_shapes_are_those_of_a_run(attention_package: Path, tokens: int) -> None:
    """Every value of the contract's attention, at the default width and at another one."""
    model = load_model(attention_package)
    inputs = step_inputs(32, 8, 0, tokens, 0)
    seen: dict[str, tuple[int, ...]] = {}
    with trace(lambda name, kind, value: seen.__setitem__(name, tuple(value.shape))):
        MLModelProxy(str(attention_package)).predict(inputs)
    found = infer_shapes(model.program.functions["main"], {name: a.shape for name, a in inputs.items()})
    assert {name: found[name] for name in seen} == seen
    assert len(seen) > 20


def test_shapes_computed_from_shapes_are_followed() -> None:
    """shape -> gather -> concat -> reshape: known without data; what depends on data is left out."""
    text = body(
        "tensor<int32, [2]> s = shape(x = x); int32 n = gather(axis = int32(0), indices = int32(0), x = s); "
        "tensor<int32, [2]> w = concat(axis = int32(0), values = (int32(-1), n)); "
        "tensor<fp32, [?, ?]> y = reshape(shape = w, x = x); tensor<int32, [?, 2]> z = non_zero(x = y); "
        "tensor<int32, [?, 2]> zz = add(x = z, y = int32(1)); tensor<fp32, [?, ?]> b = relu(x = y);"
    )
    found = infer_shapes(read_text(text).functions["main"], {"x": (2, 6)})
    assert (found["s"], found["y"], found["b"]) == ((2,), (6, 2), (6, 2))
    assert "z" not in found and "zz" not in found


def body(lines: str) -> str:
    return f"program(1.3){{ func main<ios18>(tensor<fp32, [?, ?]> x) {{ {lines} }} -> (b); }}"


def test_a_value_that_no_memory_holds_is_refused() -> None:
    """Its size is known without making it."""
    text = body("tensor<fp32, [?, ?]> b = tile(reps = tensor<int32, [2]>([1048576, 1048576]), x = x);")
    with pytest.raises(ProgramError, match=r"'tile'.*\[16777216, 16777216\] is larger"):
        infer_shapes(read_text(text).functions["main"], {"x": (16, 16)})


def test_flexible_shapes_whose_defaults_do_not_fit_are_refused_for_joins_only() -> None:
    """coremltools' tests load such programs and predict with other shapes, but expect stack to be refused."""
    linear = (
        "tensor<fp32, [?, 1]> b = linear(bias = tensor<fp32, [1]>([0x0p+0]), "
        "weight = tensor<fp32, [1, 2]>([[0x1p+0, 0x1p+0]]), x = {});"
    )
    assert "b" not in infer_shapes(read_text(body(linear.format("x"))).functions["main"], {"x": (4, 3)})
    join = "tensor<fp32, [2, 2]> c = {}; tensor<fp32, [?, ?]> b = concat(axis = int32(0), values = (c, x));"
    join = join.format("const()[val = tensor<fp32, [2, 2]>([[0x0p+0, 0x0p+0], [0x0p+0, 0x0p+0]])]")
    with pytest.raises(ProgramError, match="'concat'"):
        infer_shapes(read_text(body(join)).functions["main"], {"x": (4, 3)})
    fixed = "tensor<fp32, [4, 3]> y = reshape(shape = tensor<int32, [2]>([4, 3]), x = x); "
    with pytest.raises(ProgramError, match="'linear'"):
        infer_shapes(read_text(body(fixed + linear.format("y"))).functions["main"], {"x": (4, 3)})


def test_a_product_of_floats_and_integers_may_be_declared_integer() -> None:
    """coremltools declares the type of the operand that is no constant."""
    text = body(
        'tensor<int32, [?, ?]> n = cast(dtype = string("int32"), x = x); '
        "tensor<int32, [?, ?]> b = matmul(x = n, y = tensor<fp32, [2, 1]>([[0x1p+0], [0x1p+0]]));"
    )
    assert infer_shapes(read_text(text).functions["main"], {"x": (3, 2)})["b"] == (3, 1)
