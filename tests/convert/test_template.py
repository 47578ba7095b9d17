"""Patterns are read off two samples exactly, or refused."""

from __future__ import annotations

import pytest
from coremltools.proto import MIL_pb2, Model_pb2
from hypothesis import given
from hypothesis import strategies as st

from shardmill.convert.package import StampError, check_closed, main_block
from shardmill.convert.template import INDEX, Sample, compose, fit, fit_pattern

A, B = {"hidden": 37, "ffn": 53}, {"hidden": 41, "ffn": 59}
FAR = {"hidden": 3072, "ffn": 8192}


def value(name: str, extent: int) -> MIL_pb2.NamedValueType:
    """A result of a sample's layer."""
    message = MIL_pb2.NamedValueType(name=name)
    message.type.tensorType.dimensions.add().constant.size = extent
    return message


@given(st.integers(1, 9), st.sampled_from(["hidden", "ffn"]), st.sampled_from([0, 12]))
def test_a_name_and_an_extent_are_told_for_any_layer_and_width(factor: int, width: str, beside: int) -> None:
    def seen(index: int, widths: dict[str, int]) -> MIL_pb2.NamedValueType:
        return value(f"layers_{index}_x_209_fp16", factor * widths[width] + beside)

    pattern = fit_pattern(seen(INDEX, A), seen(INDEX, B), (A, B), (12,))
    assert pattern.stamp(17, FAR) == seen(17, FAR)


def test_what_is_the_same_everywhere_stays() -> None:
    message = value("main_2", 3)
    assert fit_pattern(message, message, (A, B)).holes == ()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(value("b_1", 37), id="another name"),
        pytest.param(value("a_1", 42), id="no multiple of a width"),
        pytest.param(value("a_1", 38), id="of no sample"),
        pytest.param(MIL_pb2.NamedValueType(name="a_1"), id="built differently"),
    ],
)
def test_what_does_not_fit_is_refused(other: MIL_pb2.NamedValueType) -> None:
    with pytest.raises(StampError):
        fit_pattern(value("a_1", 37), other, (A, B))


@pytest.mark.parametrize(("x", "y"), [(b"a", b"b"), (0.1, 0.2)])
def test_constants_that_depend_on_a_width_are_refused(x: bytes | float, y: bytes | float) -> None:
    messages = [MIL_pb2.TensorValue() for _ in (x, y)]
    for message, content in zip(messages, (x, y), strict=True):
        if isinstance(content, bytes):
            message.bytes.values = content
        else:
            message.floats.values.append(content)
    with pytest.raises(StampError, match="no multiple of a width"):
        fit_pattern(*messages, (A, B))


def program(index: int, widths: dict[str, int], more: int = 0) -> Model_pb2.Model:
    """x -> relu of a state and a weight -> y, and then some."""
    spec = Model_pb2.Model()
    main = spec.mlProgram.functions["main"]
    for name, kept in (("x", spec.description.input), (f"k_{index}", spec.description.state)):
        main.inputs.add(name=name)
        kept.add(name=name)
    block = main.block_specializations["CoreML8"]
    spec.description.output.add(name="y")
    block.outputs.append("y")
    x = "x"
    for i in range(1 + more):
        operation = block.operations.add(type="relu")
        operation.attributes["name"].immediateValue.tensor.strings.values.append("")
        operation.inputs["x"].arguments.add().name = x
        operation.inputs["values"].arguments.add().name = f"k_{index}"
        x = "y" if i == more else f"z_{i}"
        operation.outputs.add(name=x).type.tensorType.dimensions.add().constant.size = 2 * widths["ffn"]
    return spec


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_programs_of_any_length_are_composed_from_samples_of_one_layer(layers: int) -> None:
    template = fit(Sample(program(INDEX, A), A), Sample(program(INDEX, B), B))
    spec = compose([template] * layers, 20, ["x"], FAR)
    operations = main_block(spec).operations
    assert [op.inputs["values"].arguments[0].name for op in operations] == [f"k_{20 + i}" for i in range(layers)]
    assert [op.outputs[0].name for op in operations] == [*(f"layer_{20 + i}_out" for i in range(layers - 1)), "y"]
    assert {op.outputs[0].type.tensorType.dimensions[0].constant.size for op in operations} == {2 * FAR["ffn"]}
    assert [state.name for state in spec.description.state] == [f"k_{20 + i}" for i in range(layers)]


def test_samples_of_other_operations_are_refused() -> None:
    with pytest.raises(StampError, match="other operations at another width"):
        fit(Sample(program(INDEX, A), A), Sample(program(INDEX, B, more=1), B))


@pytest.mark.parametrize("broken", ["used before", "defined twice", "nothing defines"])
def test_a_program_whose_names_do_not_meet_is_refused(broken: str) -> None:
    spec = program(3, A, more=2)
    check_closed(spec)
    block = main_block(spec)
    if broken == "used before":
        block.operations[1].inputs["x"].arguments[0].name = "y_99"
    elif broken == "defined twice":
        block.operations.append(block.operations[2])
    else:
        block.outputs.append("z")
    with pytest.raises(StampError, match=broken):
        check_closed(spec)
