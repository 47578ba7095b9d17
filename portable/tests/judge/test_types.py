"""Programs whose parts contradict each other are refused when they are loaded, with what contradicts what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from portable_coreml.errors import ExecutionError, InputError, ProgramError
from portable_coreml.files.bundle import load_model
from portable_coreml.files.read_text import read_text
from portable_coreml.judge.loadable import check_function
from portable_coreml.program import Function, TensorType
from portable_coreml.proxy import MLModelProxy
from portable_coreml.run.signature import to_tensor

from tests.test_hostile import X, Y, bundle

K = f"state<tensor<fp32, [2, 2]>> k, {X}"
WHOLE = "tensor<int32, [2, 2]> i = const()[val = tensor<int32, [2, 2]>([[1, 2], [3, 4]])];"
ROW = "tensor<fp32, [2]> r = reduce_sum(axes = tensor<int32, [1]>([0]), keep_dims = bool(false), x = x);"
YES = "bool yes = const()[val = bool(true)];"
REFUSED = {
    "operands of two types": (X, f"{WHOLE} {Y} = add(x = x, y = i);", "'y' is int32, 'x' is fp32; they must be of one"),
    "a result of another type": (X, f"{WHOLE} {Y} = relu(x = i);", "relu of int32 gives 'y', declared fp32"),
    "a cast to another type": (
        X,
        f'string t = const()[val = string("fp16")]; {Y} = cast(dtype = t, x = x);',
        "to fp16 gives 'y', declared fp32",
    ),
    "one name for two parameters": (f"{X}, {X}", f"{Y} = relu(x = x);", "parameter 'x' is there twice"),
    "a list as a parameter": (f"list<fp32, ?> l, {X}", f"{Y} = relu(x = x);", "'l' is neither a tensor nor a state"),
    "a state that is not read": (K, f"{Y} = relu(x = k);", "takes the state 'k' without a read_state"),
    "a state returned": (K.replace(" k,", " y,"), "", "the state 'y' is returned without a read_state"),
    "a write to an input": (X, f"write_state(data = x, input = x); {Y} = relu(x = x);", "'input' is not a state"),
    "a write of another shape": (
        K,
        f"{ROW} write_state(data = r, input = k); {Y} = relu(x = x);",
        r"the state 'k' holds fp32 \[2, 2\], this is fp32 \[2\]",
    ),
    "a loop without variables": (X, f"{YES} {Y} = while_loop() () {{ }} -> (yes) () {{ }} -> (x);", "starts from 0"),
    "a branch with too many results": (
        X,
        f"{YES} {Y} = cond(pred = yes) () {{ }} -> (x) () {{ }} -> (x, x);",
        "its second branch gives 2 values, not 1",
    ),
    "a constant without a name": (X, f"const()[val = bool(true)]; {Y} = relu(x = x);", "has 0 results, not 1"),
}


def function(parameters: str, lines: str) -> Function:
    text = f"program(1.3){{ func main<ios18>({parameters}) {{ {lines} }} -> (y); }}"
    return read_text(text).functions["main"]


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_contradictions_are_named(what: str) -> None:
    parameters, lines, message = REFUSED[what]
    with pytest.raises(ProgramError, match=message):
        check_function(function(parameters, lines))


def test_what_converters_make_is_sound(attention_package: Path) -> None:
    for made in load_model(attention_package).program.functions.values():
        check_function(made)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (f"{WHOLE} {Y} = add(x = x, y = i);", "they must be of one type"),
        (f"{Y} = relu(x = (x, x));", "a list of 2 values, not one"),
        (f"{Y}, tensor<fp32, [2, 2]> z = relu(x = x);", "gives 1 values, the program names 2: 'y', 'z'"),
        (f"{WHOLE} tensor<fp32, [2, 2]> z = identity(x = i); {Y} = relu(x = z);", "declared fp32, it is computed as"),
    ],
)
def test_they_are_refused_at_load(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        MLModelProxy(str(bundle(tmp_path, lines)))


HUGE = (
    "tensor<fp32, [?, ?]> f = fill(shape = s, value = fp32(0x1p+0)); tensor<fp32, [1, 1]> m = "
    "reduce_max(axes = tensor<int32, [2]>([0, 1]), keep_dims = bool(true), x = f);"
)
SIZE = (
    f"{ROW} tensor<fp32, [2]> l = mul(x = r, y = fp32(0x1p+16)); "
    'tensor<int32, [2]> s = cast(dtype = string("int32"), x = l);'
)


@pytest.mark.parametrize(
    "lines",
    [
        f"{SIZE} {HUGE} {Y} = add(x = x, y = m);",
        f"{YES} {SIZE} {Y} = cond(pred = yes) () {{ {HUGE} }} -> (x) () {{ }} -> (x);",
    ],
)
def test_a_size_that_is_computed_is_looked_at_before_memory_is_taken(tmp_path: Path, lines: str) -> None:
    """In the first run and in its plan's: 64 GiB would be written, where the system lets them be taken."""
    model = MLModelProxy(str(bundle(tmp_path, lines)))
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(ExecutionError, match="the result of fill of shape .* is larger than"):
        model.predict({"x": ones})
    model.predict({"x": ones / 65536})
    with pytest.raises(ExecutionError, match="the result of fill of shape .* is larger than"):
        model.predict({"x": ones})


@pytest.mark.parametrize(
    "values", [np.array([2**40]), np.array([2**33], np.uint64), np.array([1e12]), np.array([np.inf])]
)
def test_an_integer_that_does_not_fit_is_refused(values: np.ndarray) -> None:
    """It was wrapped around."""
    with pytest.raises(InputError, match="input 'ids' holds numbers that do not fit into int32"):
        to_tensor(values, TensorType("int32", (1,)), "ids", half=False)
    fits = to_tensor(np.array([2**31 - 1, -(2**31)]), TensorType("int32", (2,)), "ids", half=False)
    assert fits.tolist() == [2**31 - 1, -(2**31)]
