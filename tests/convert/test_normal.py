"""The normal form of a program: what it says follows from the kinds of its layers, and is what was said before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from coremltools.proto import MIL_pb2
from models.tiny_families import SLOTS, tiny_config

from shardmill.convert import trace
from shardmill.convert.normal import constants_by_layer, layer_in, layer_out, normal_form, normalise
from shardmill.convert.template.pattern import StampError, check_closed, main_block
from shardmill.models import family
from shardmill.models.contract import constants, window_slots
from shardmill.plan import Part


@pytest.fixture(scope="module")
def converted() -> Any:
    """Four layers of Gemma 3 as coremltools leaves them: sliding, sliding, full, sliding; the first is the seventh."""
    a = family("gemma3_text").describe(tiny_config("gemma3_text"), SLOTS).architecture
    part = Part("p", "layers", 7, 11, SLOTS, window_slots(a.window, 4, SLOTS), 4, a.graph, a.kinds, ())
    random = torch.Generator().manual_seed(0)
    weights = {path: torch.rand(shape, generator=random) + 0.5 for path, shape in constants(part.blueprint).items()}
    return trace.convert_quickly(part, weights, "fp16")


def copied(spec: Any) -> Any:
    copy = type(spec)()
    copy.CopyFrom(spec)
    return copy


def text(operations: tuple[Any, ...], index: int) -> str:
    """Operations with the layer's index left out."""
    spelled = "".join(str(operation) for operation in operations)
    for name in ("layer_{}_", "layers_{}_", '"k_{}"', '"v_{}"'):
        spelled = spelled.replace(name.format(index), name.format("I"))
    return "\n".join(line for line in spelled.splitlines() if "offset" not in line)


def test_a_layer_s_text_follows_from_its_kind(converted: Any) -> None:
    layers = normal_form(converted).layers
    assert list(layers) == [7, 8, 9, 10]
    assert text(layers[7], 7) == text(layers[8], 8) == text(layers[10], 10) != text(layers[9], 9)


def test_a_program_in_normal_form_stays_as_it_is(converted: Any) -> None:
    once = copied(converted)
    normalise(once)
    twice = copied(once)
    normalise(twice)
    assert once == twice != converted


def test_no_operation_is_lost_or_made(converted: Any) -> None:
    """Constants aside, of which there are more."""
    spec = copied(converted)
    normalise(spec)
    check_closed(spec)
    counted = [
        Counter(op.type for op in main_block(each).operations if op.type != "const") for each in (converted, spec)
    ]
    assert counted[0] == counted[1]


def test_weights_keep_names_and_order(converted: Any) -> None:
    """The order decides where they lie in the weight file."""
    spec = copied(converted)
    normalise(spec)
    found = [
        [op for op in main_block(each).operations if op.attributes["val"].WhichOneof("value") == "blobFileValue"]
        for each in (converted, spec)
    ]
    assert found[0] == found[1] != []


def test_a_layer_reads_the_stream_and_what_is_shared_only(converted: Any) -> None:
    normal = normal_form(converted)
    for index, operations in normal.layers.items():
        own = {output.name for op in operations for output in op.outputs}
        read = {a.name for op in operations for key in op.inputs for a in op.inputs[key].arguments} - own
        assert layer_in(index) in read and layer_out(index) in own
        assert not [name for name in read if name.startswith("layer_") and name != layer_in(index)]


def test_what_is_shared_is_named_by_what_it_computes_in_letters(converted: Any) -> None:
    """A template takes digits for a layer's index or for numbers that grow with it."""
    shared = normal_form(converted).shared
    assert len(shared) == 10  # two masks, two sums of the write masks and what they leave, two tables of two halves
    assert not [name for name in shared if any(character.isdigit() for character in name)]


def step(result: str, *read: str) -> Any:
    operation = MIL_pb2.Operation(type="add")
    operation.outputs.add(name=result)
    for name in read:
        operation.inputs["values"].arguments.add(name=name)
    return operation


def test_layers_that_more_than_one_value_joins_are_refused() -> None:
    steps = [step("a", "x", "layers_0_w"), step("b", "a"), step("c", "a", "b", "layers_1_w"), step("d", "a", "c")]
    with pytest.raises(StampError, match="layer 1: more than one value"):
        constants_by_layer(
            steps[:2] + [step("e", "x", "b")] + [step("c", "x", "e", "layers_1_w")], {"layers_0_w", "layers_1_w"}, ()
        )
    assert {i: len(part) for i, part in constants_by_layer(steps, {"layers_0_w", "layers_1_w"}, ()).items()} == {
        0: 1,
        1: 3,
    }
