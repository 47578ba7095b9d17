"""Patterns are read off two samples exactly, or refused."""

from __future__ import annotations

import pytest
from coremltools.proto import MIL_pb2, Model_pb2
from hypothesis import given
from hypothesis import strategies as st

from shardmill.convert.template.pattern import (
    FIRST,
    Place,
    Sample,
    StampError,
    check_closed,
    fit,
    fit_name,
    fit_template,
    fit_value,
    main_block,
    sequences,
)

A, B = {"hidden": 37, "ffn": 53}, {"hidden": 41, "ffn": 59}
SEEN = [Place(1, 3, FIRST + 1, A), Place(1, 4, FIRST + 1, B), Place(2, 4, FIRST + 2, B)]
FAR = Place(17, 32, 40, {"hidden": 3072, "ffn": 8192})
small = st.integers(0, 500)


@given(small, small, small)
def test_a_name_with_affine_numbers_is_told_for_any_layer(base: int, per_index: int, per_stretches: int) -> None:
    def name(place: Place) -> str:
        number = base + per_index * place.index + per_stretches * place.stretches
        return f"layers_{place.absolute}_x_{number}_fp16"

    form = fit_name([name(place) for place in SEEN], SEEN)
    assert form is not None
    assert form.at(FAR) == name(FAR)


@given(st.integers(1, 9), st.sampled_from(["hidden", "ffn"]))
def test_an_extent_is_told_as_a_multiple_of_its_width(factor: int, width: str) -> None:
    form = fit_value([factor * place.widths[width] for place in SEEN], SEEN)
    assert form is not None
    assert form.at(FAR) == factor * FAR.widths[width]


def test_what_is_the_same_everywhere_has_no_form() -> None:
    assert fit_value([3, 3, 3], SEEN) is None
    assert fit_value([b"\0,"] * 3, SEEN) is None
    assert fit_value(["main_2"] * 3, SEEN) is None


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(["a_1", "b_1", "b_2"], id="another text"),
        pytest.param(["a_1", "a", "a_1"], id="no number"),
        pytest.param([f"k_{FIRST + 1}", f"k_{FIRST + 2}", f"k_{FIRST + 2}"], id="another layer"),
        pytest.param([37, 41, 42], id="no multiple of a width"),
        pytest.param([37, 37, 41], id="of the wrong sample"),
        pytest.param([b"a", b"b", b"b"], id="constants"),
        pytest.param([0.1, 0.2, 0.2], id="fractions"),
    ],
)
def test_what_does_not_fit_is_refused(values: list[object]) -> None:
    with pytest.raises(StampError):
        fit_value(values, SEEN)


def test_one_layer_alone_has_no_numbers_to_fit() -> None:
    alone = [Place(0, 1, FIRST, A), Place(0, 1, FIRST, B)]
    with pytest.raises(StampError):
        fit_name(["x_1", "x_2"], alone)


def test_messages_built_differently_are_refused() -> None:
    plain, attributed = MIL_pb2.Operation(type="add"), MIL_pb2.Operation(type="add")
    attributed.attributes["name"].immediateValue.tensor.strings.values.append("x")
    with pytest.raises(StampError, match="built differently"):
        fit(list(zip(SEEN, [plain, attributed, plain], strict=True)))


def program(layers: int, widths: dict[str, int], first: int, stray: int = 0, skew: str = "") -> Model_pb2.Model:
    """x -> relu -> relu ..., one per layer with a state; named as coremltools names: numbers, and none in the last."""
    spec = Model_pb2.Model()
    main = spec.mlProgram.functions["main"]
    main.inputs.add(name="x")
    block = main.block_specializations["CoreML8"]
    block.outputs.append("y")
    x = "x"
    for k in range(layers):
        main.inputs.add(name=f"k_{first + k}")
        spec.description.state.add(name=f"k_{first + k}")
        operation = block.operations.add(type="relu")
        operation.inputs["x"].arguments.add().name = x + (skew if k else "")
        operation.inputs["values"].arguments.add().name = f"k_{first + k}"
        x = "y" if k == layers - 1 else f"y_{5 + 2 * k + layers}"
        output = operation.outputs.add(name=x)
        output.type.tensorType.dimensions.add().constant.size = 2 * widths["ffn"] + (stray if k == 1 else 0)
    return spec


@pytest.mark.parametrize("layers", [2, 3, 4, 9, 64])
def test_programs_of_any_length_are_composed_from_samples_of_three_and_four(layers: int) -> None:
    template = fit_template(Sample(program(3, A, FIRST), 3, A), Sample(program(4, B, FIRST), 4, B))
    wanted = program(layers, {"hidden": 7, "ffn": 11}, 20)
    composed = template.compose(20, layers, {"hidden": 7, "ffn": 11})
    assert composed.SerializeToString(deterministic=True) == wanted.SerializeToString(deterministic=True)


def test_composed_programs_are_checked() -> None:
    """Numbers may fit a pattern each and still not meet."""
    template = fit_template(*(Sample(program(n, w, FIRST, skew="1"), n, w) for n, w in ((3, A), (4, B))))
    with pytest.raises(StampError, match="used before"):
        template.compose(20, 5, A)


def test_a_layer_unlike_the_others_is_refused() -> None:
    odd = Sample(program(4, B, FIRST, stray=1), 4, B)
    with pytest.raises(StampError):
        fit_template(Sample(program(3, A, FIRST), 3, A), odd)


def test_sequences_that_no_layer_accounts_for_are_refused() -> None:
    longer = program(3, A, FIRST)
    for _ in range(20):
        sequences(longer)[1].add(name="z")
    with pytest.raises(StampError, match="not made of like layers"):
        fit_template(Sample(longer, 3, A), Sample(program(4, B, FIRST), 4, B))


@pytest.mark.parametrize("broken", ["used before", "defined twice", "nothing defines"])
def test_a_program_whose_names_do_not_meet_is_refused(broken: str) -> None:
    spec = program(3, A, 0)
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
