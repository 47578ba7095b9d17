"""The normal form of a program: what it says follows from the kinds of its layers, and is what was said before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import oracle
import pytest
from coremltools.proto import MIL_pb2
from models.tiny_configs import tiny_config
from models.tiny_families import SLOTS

from shardmill.convert import trace
from shardmill.convert.normal import normal_form
from shardmill.convert.package import check_closed, copied, main_block
from shardmill.models import family
from shardmill.models.contract import GraphSpec, window_slots
from shardmill.plan import Part


@pytest.fixture(scope="module")
def converted() -> tuple[Part, Any]:
    """Four layers of Gemma 3 as coremltools leaves them: sliding, sliding, full, sliding; the first is the seventh."""
    a = family("gemma3_text").describe(tiny_config("gemma3_text"), SLOTS).architecture
    layers, ring = tuple(enumerate(a.kinds, start=7)), window_slots(a.window, 4, SLOTS)
    part = Part("p", GraphSpec("layers", a.graph, layers, tokens=4, slots=SLOTS, window_slots=ring))
    return part, trace.convert(part.spec)


@pytest.fixture(scope="module")
def normal(converted: tuple[Part, Any]) -> Any:
    """The program in normal form."""
    part, spec = converted
    return oracle.normalised(copied(spec), part)


def text(operations: tuple[Any, ...], index: int) -> str:
    """Operations with the layer's index left out."""
    spelled = "".join(str(operation) for operation in operations)
    for name in ("layer_{}_", "layers_{}_", '"k_{}"', '"v_{}"'):
        spelled = spelled.replace(name.format(index), name.format("I"))
    return "\n".join(line for line in spelled.splitlines() if "offset" not in line)


def test_a_layer_s_text_follows_from_its_kind(converted: Any) -> None:
    pieces = normal_form(converted[1], oracle.pieces_of).pieces
    assert list(pieces) == ["layer_7", "layer_8", "layer_9", "layer_10"]
    seven, eight, nine, ten = (text(pieces[f"layer_{i}"], i) for i in (7, 8, 9, 10))
    assert seven == eight == ten != nine


def test_a_program_in_normal_form_stays_as_it_is(converted: tuple[Part, Any], normal: Any) -> None:
    part, spec = converted
    assert oracle.normalised(copied(normal), part) == normal != spec


def test_no_operation_is_lost_or_made(converted: tuple[Part, Any], normal: Any) -> None:
    """Constants aside, of which there are more."""
    check_closed(normal)
    counted = [
        Counter(op.type for op in main_block(each).operations if op.type != "const") for each in (converted[1], normal)
    ]
    assert counted[0] == counted[1]


def test_weights_keep_names_and_order(converted: tuple[Part, Any], normal: Any) -> None:
    """The order decides where they lie in the weight file."""
    found = [
        [op for op in main_block(each).operations if op.attributes["val"].WhichOneof("value") == "blobFileValue"]
        for each in (converted[1], normal)
    ]
    assert found[0] == found[1] != []


def test_a_layer_reads_the_stream_and_what_is_shared_only(converted: tuple[Part, Any]) -> None:
    for piece, operations in normal_form(converted[1], oracle.pieces_of).pieces.items():
        own = {output.name for op in operations for output in op.outputs}
        read = {a.name for op in operations for key in op.inputs for a in op.inputs[key].arguments} - own
        assert f"{piece}_in" in read and f"{piece}_out" in own
        assert not [name for name in read if name.startswith("layer_") and name != f"{piece}_in"]


def test_what_is_shared_is_named_by_what_it_computes_in_letters(converted: tuple[Part, Any]) -> None:
    """A template may take digits for a layer's index."""
    shared = normal_form(converted[1], oracle.pieces_of).shared
    assert len(shared) == 10  # two masks, two sums of the write masks and what they leave, two tables of two halves
    assert not [name for name in shared if any(character.isdigit() for character in name)]


def step(result: str, *read: str) -> Any:
    operation = MIL_pb2.Operation(type="add")
    operation.outputs.add(name=result)
    for name in read:
        operation.inputs["values"].arguments.add(name=name)
    return operation


WEIGHTS = {"layers_0_w", "layers_1_w"}
STEPS = [step("a", "x", "layers_0_w"), step("b", "a"), step("c", "a", "b", "layers_1_w"), step("d", "a", "c")]


def lengths(steps: list[Any], states: set[str]) -> dict[str, int]:
    return {name: len(found) for name, found in oracle.pieces_of(steps, WEIGHTS, states, "x").items()}


def test_layers_that_more_than_one_value_joins_are_refused() -> None:
    crossed = [*STEPS[:2], step("e", "x", "b"), step("c", "x", "e", "layers_1_w")]
    with pytest.raises(ValueError, match="layer 1: more than one value"):
        lengths(crossed, {"k_0"})
    assert lengths(STEPS, {"k_0"}) == {"layer_0": 1, "layer_1": 3}


def test_layers_that_keep_nothing_are_pieces_too() -> None:
    """As layers of an MLP alone are."""
    steps = [step("a", "x", "layers_0_w"), step("b", "a", "layers_1_w")]
    assert lengths(steps, set()) == {"layer_0": 1, "layer_1": 1}
