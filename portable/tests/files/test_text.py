"""MIL text: what is written can be read, number formats are exact, damage is an error with a line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files.bundle import load_model
from portable_coreml.files.features import Feature
from portable_coreml.files.read_text import read_text
from portable_coreml.files.write_text import Style, float_text, write_text
from portable_coreml.program import Program, TensorType, Value

SMALL = """program(1.3)
[buildInfo = dict<string, string>({{"coremlc-component-MIL", "x"}, {"coremlc-version", "1"}})]
{
    func main<ios18>(state<tensor<fp16, [1, 4]>> cache, tensor<fp16, [1, ?]> x) [N = tuple<string, int32>(("a", 3))] {
            tensor<fp16, [2]> half = const()[name = string("half"), val = tensor<fp16, [2]>([0x1p-24, -inf])];
            tensor<int4, [3]> few = const()[name = string("few"), val = tensor<int4, [3]>([-8, 0, 7])];
            bool flag = const()[name = string("quo\\"ted\\n"), val = bool(false)];
            tensor<fp16, [1, 4]> old = read_state(input = cache)[name = string("old")];
            write_state(data = old, input = cache)[name = string("write")];
            tensor<fp16, [1, ?]> both, tensor<fp16, [1, ?]> rest = split(axis = int32(-1), x = x);
            tensor<fp16, [1, ?]> y = cond(pred = flag)[name = string("c")] () {
                tensor<fp16, [1, ?]> p = concat(axis = int32(1), values = (both, rest))[name = string("p")];
            } -> (p) () {
            } -> (x);
        } -> (y);
}"""


def rewritten(text: str) -> str:
    return write_text(read_text(text), 9, {})


def body(line: str) -> str:
    return f"program(1.3){{ func main<ios18>(tensor<fp32, [2]> x) {{ {line} }} -> (x); }}"


def test_text_survives_reading_and_writing() -> None:
    """States, tuples, sub-byte integers, escapes, several results, list arguments and nested blocks, to the byte."""
    once = rewritten(SMALL)
    assert rewritten(once) == once
    assert [line for line in SMALL.splitlines()[3:12]] == once.splitlines()[3:12]
    block = read_text(once).functions["main"].block
    assert [op.kind for op in block.walk()] == ["const"] * 3 + ["read_state", "write_state", "split", "cond", "concat"]
    flag = block.ops[2]
    assert flag.name == 'quo"ted\n' and flag.attributes["val"].data is not None


def test_a_package_and_its_text_are_the_same_program(attention_package: Path) -> None:
    """Protobuf -> IR -> text -> IR -> text gives the first text again, in both dialects."""
    model = load_model(attention_package)
    for version in (8, 9):
        text = write_text(model.program, version, {})
        assert write_text(read_text(text), version, {}) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0x0p+0"),
        (-0.0, "-0x0p+0"),
        (1.0, "0x1p+0"),
        (-1.5, "-0x1.8p+0"),
        (2.0**-24, "0x1p-24"),
        (1e4, "0x1.388p+13"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
    ],
)
def test_floats_are_c99_hexadecimal(value: float, text: str) -> None:
    """The notation of Apple's compiler: no trailing zeros, fp16 subnormals normalised."""
    assert float_text(value) == text
    assert float.fromhex(text) == value


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("-2.25e-3", -2.25e-3), ("10", 10.0), ("0x1.8p+1", 3.0)])
def test_floats_are_read_in_either_notation(text: str, value: float) -> None:
    """Other writers than Apple's use decimals; digits without 0x are never taken for hexadecimal ones."""
    op = read_text(body(f"fp64 c = const()[val = fp64({text})];")).functions["main"].block.ops[0]
    assert op.attributes["val"].data == value


def test_scalars_are_written_in_two_dialects() -> None:
    """Up to specification 8 a scalar is a tensor of no axes, from 9 on it is bare."""
    one = Value(TensorType("int32"), np.array(1, np.int32))
    assert Style(bare=False).value(one) == "tensor<int32, []>(1)"
    assert Style(bare=True).value(one) == "int32(1)"


def test_flexible_inputs_become_a_function_attribute() -> None:
    """The attribute that coremlc 3600 writes for a range, whose text is public."""
    program = read_text(body("").replace("[2]", "[?, 4]"))
    text = write_text(program, 9, {"main": [Feature("x", "fp32", (1, 4), ranges=((1, 4), (4, 4)))]})
    wanted = (
        "[FlexibleShapeInformation = tuple<tuple<string, dict<string, tensor<int32, [?]>>>, "
        "tuple<string, dict<string, list<tensor<int32, [2]>, ?>>>>"
        '((("DefaultShapes", {{"x", [1, 4]}}), ("RangeDims", {{"x", [[1, 4], [4, 4]]}})))]'
    )
    assert wanted in text
    assert isinstance(read_text(text), Program)


def test_before_specification_9_the_attribute_is_in_the_older_form() -> None:
    """As coremlc 3520 writes it for an iOS17 program of specification 8, whose text is public."""
    program = read_text(body("").replace("[2]", "[1, ?]").replace("ios18", "ios17"))
    text = write_text(program, 8, {"main": [Feature("x", "fp32", (1, 266), ranges=((1, 1), (2, 4000)))]})
    wanted = (
        "func main<ios17>(tensor<fp32, [1, ?]> x) [FlexibleShapeInformation = tuple<tuple<tensor<string, []>, "
        "dict<tensor<string, []>, tensor<int32, [?]>>>, tuple<tensor<string, []>, dict<tensor<string, []>, "
        'list<tensor<int32, [2]>, ?>>>>((("DefaultShapes", {{"x", [1, 266]}}), '
        '("RangeDims", {{"x", [[1, 1], [2, 4000]]}})))] {'
    )
    assert wanted in text
    assert text.startswith("program(1.0)\n")


def test_enumerated_shapes_are_listed_under_keys() -> None:
    """The form that coremlc 3600 writes, whose text is public; the keys' digits are of unknown origin."""
    program = read_text(body("").replace("[2]", "[?]"))
    text = write_text(program, 9, {"main": [Feature("x", "fp32", (4,), choices=((1,), (2,), (4,)))]})
    assert len(set(re.findall(r'"[0-9a-f]{8}"', text))) == 3
    wanted = (
        "[FlexibleShapeInformation = tuple<tuple<string, dict<string, tensor<int32, [?]>>>, "
        'tuple<string, dict<string, dict<string, tensor<int32, [?]>>>>>((("DefaultShapes", {{"x", [4]}}), '
        '("EnumeratedShapes", {{KEY, {{"x", [N]}}}, {KEY, {{"x", [N]}}}, {KEY, {{"x", [N]}}}})))]'
    )
    assert wanted in re.sub(r'{"[0-9a-f]{8}", {{"x", \[[124]\]', '{KEY, {{"x", [N]', text)
    assert isinstance(read_text(text), Program)


def test_an_unknown_rank_survives() -> None:
    """The notation is ours: no public sample has one."""
    text = body("tensor<fp32, [...]> y = fill(shape = x, value = fp32(0x1p+0));")
    (op,) = read_text(text).functions["main"].block.ops
    assert op.outputs[0].type == TensorType("fp32", (None,), variadic=True)
    assert "tensor<fp32, [...]> y" in write_text(read_text(text), 9, {})
    with pytest.raises(ProgramError, match="a list has one length"):
        read_text(body("list<tensor<fp32, [2]>, ...> y = make_list(x = x);"))


@pytest.mark.parametrize(
    "line",
    [
        "tensor<fp32, [2]> y = relu(x = x",
        "tensor<fp33, [2]> y = relu(x = x);",
        "tensor<fp32, [-2]> y = relu(x = x);",
        "tensor<fp32, [2]> y = const()[val = tensor<fp32, [2]>([0x1p+0])];",
        "tensor<fp32, [2]> y = const()[val = tensor<fp32, [9999999999999]>([0x1p+0])];",
        "tensor<int32, [1]> y = const()[val = tensor<int32, [1]>([99999999999])];",
        "tensor<fp32, [2]> y = const()[val = " + "tuple<" * 200 + "string" + ">" * 200 + "()];",
        "tensor<fp32, [2]> y = const()[val = tensor<fp32, [2]>(" + "[" * 5000 + ")];",
        '"',
        "\x00",
    ],
)
def test_damaged_text_is_an_error_with_a_line(line: str) -> None:
    """Wherever the text stops making sense, ProgramError says which line; nothing recurses or allocates without
    bound.
    """
    with pytest.raises(ProgramError, match="line 1"):
        read_text(body(line))
