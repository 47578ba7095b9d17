"""Programs of any length are composed from the program of one layer."""

from __future__ import annotations

import pytest
from coremltools.proto import Model_pb2

from shardmill.convert.package import StampError, check_closed, main_block
from shardmill.convert.template import INDEX, LENDER, compose, template_of


def program(index: int | str, more: int = 0) -> Model_pb2.Model:
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
        operation.outputs.add(name=x)
    return spec


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_programs_of_any_length_are_composed_from_one_layer(layers: int) -> None:
    spec = compose([template_of(program(INDEX), f"layer_{INDEX}")] * layers, 20, ["x"])
    operations = main_block(spec).operations
    assert [op.inputs["values"].arguments[0].name for op in operations] == [f"k_{20 + i}" for i in range(layers)]
    assert [op.outputs[0].name for op in operations] == [*(f"layer_{20 + i}_out" for i in range(layers - 1)), "y"]
    assert [state.name for state in spec.description.state] == [f"k_{20 + i}" for i in range(layers)]


def lending(hosted: bool) -> Model_pb2.Model:
    """A layer that writes its cache and reads it: x, k -> y."""
    spec, kept = program(INDEX), f"k_{INDEX}"
    if hosted:
        spec.description.input.add().CopyFrom(spec.description.state.pop())
    (last,) = main_block(spec).operations
    steps = [("mul", (kept, "x"), "b"), ("add", ("b", "x"), "c")]
    if not hosted:
        steps = [("read_state", (kept,), "a"), ("mul", ("a", "x"), "b"), ("write_state", ("b",), "")]
        steps += [("read_state", (kept,), "c")]
    last.inputs["values"].arguments[0].name = "c"
    del main_block(spec).operations[:]
    for kind, read, result in steps:
        operation = main_block(spec).operations.add(type=kind)
        operation.attributes["name"].immediateValue.tensor.strings.values.append("")
        for i, name in enumerate(read):
            operation.inputs["xyz"[i]].arguments.add(name=name)
        if result:
            operation.outputs.add(name=result)
    main_block(spec).operations.append(last)
    return spec


@pytest.mark.parametrize("hosted", [False, True])
def test_a_layer_reads_what_an_earlier_one_makes_of_its_cache(hosted: bool) -> None:
    """With the new tokens in it, wherever the cache is kept."""
    sharing = program(LENDER)
    sharing.description.input.add().CopyFrom(sharing.description.state.pop())
    templates = [template_of(one, f"layer_{INDEX}") for one in (lending(hosted), program(INDEX), sharing)]
    inputs = ["x", "k_7"] if hosted else ["x"]
    *_, made, _, _, read = main_block(compose(templates, 7, inputs, {9: 7})).operations
    assert made.type == ("add" if hosted else "read_state")
    assert read.inputs["values"].arguments[0].name == made.outputs[0].name


@pytest.mark.parametrize("broken", ["used before", "defined twice", "nothing defines"])
def test_a_program_whose_names_do_not_meet_is_refused(broken: str) -> None:
    spec = program(3, more=2)
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
