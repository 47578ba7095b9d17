"""After a NaN: one more prediction, under observation, names the operation that it began with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import portable_coreml
import pytest
from portable_coreml import FirstNonFinite, NonFinite, trace

from tests.conftest import step_inputs


def first_of(model: Any, inputs: dict[str, np.ndarray], state: Any) -> NonFinite | None:
    first = FirstNonFinite()
    with trace(first):
        model.predict(dict(inputs), state)
    return first.found


@pytest.fixture
def model(attention_package: Path) -> Any:
    """The attention layer in fp16 mode."""
    import coremltools as ct

    portable_coreml.install("fp16")
    return ct.models.MLModel(str(attention_package))


def test_the_operation_that_overflows_is_named(model: Any) -> None:
    """Input and weights are finite; the convolution is the first that leaves fp16, though far more is NaN after it."""
    state, inputs = model.make_state(), step_inputs(32, 8, 0, 1, 0)
    assert first_of(model, inputs, state) is None
    before = {name: state.read_state(name) for name in ("cache_k", "cache_v")}
    inputs["x"] = np.full_like(inputs["x"], 65504)
    assert np.isnan(model.predict(dict(inputs), state)["hidden"]).any()
    for name, value in before.items():
        state.write_state(name, value)
    found = first_of(model, inputs, state)
    assert found is not None and (found.kind, found.what) == ("conv", "overflow")
    operations = model.get_spec().mlProgram.functions["main"].block_specializations["CoreML8"].operations
    assert found.name in [output.name for op in operations if op.type == "conv" for output in op.outputs]
    assert str(found) == f"overflow in conv '{found.name}'"


def test_a_state_that_is_broken_already_is_named(model: Any) -> None:
    """What is found then is the read of the state: the overflow lies in an earlier prediction."""
    state = model.make_state()
    state.write_state("cache_v", np.full((1, 1, 8, 32), np.nan, np.float32))
    found = first_of(model, step_inputs(32, 8, 0, 1, 0), state)
    assert found is not None and (found.kind, found.what) == ("read_state", "NaN")


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_in_fp16_an_observed_prediction_has_the_bits_of_any_other(
    tokens: int, build_program: Callable[..., Any]
) -> None:
    """The first prediction is interpreted too. A convolution adds its bias to a sum that is complete."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    portable_coreml.install("fp16")
    draw = np.random.default_rng(0).standard_normal
    weight, bias = draw((512, 256, 1, 1)).astype(np.float32), 80 * draw(512).astype(np.float32)

    def program(x: Any) -> Any:
        return mb.conv(x=x, weight=weight, bias=bias, pad_type="valid")

    model = build_program(program, {"x": (1, 256, tokens, 1)}, compute_precision=ct.precision.FLOAT16)
    for _ in range(20):
        given = {"x": draw((1, 256, tokens, 1)).astype(np.float32)}
        (later,) = model.predict(given).values()
        with trace(lambda *_: None):
            (observed,) = model.predict(given).values()
        np.testing.assert_array_equal(observed, later)
