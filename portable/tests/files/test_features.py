"""Input checks: every mistake is an error that names the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest

from tests.conftest import step_inputs


@pytest.fixture
def proxy(attention_package: Path) -> Any:
    from portable_coreml.proxy import MLModelProxy

    return MLModelProxy(str(attention_package))


def test_wrong_inputs_are_named(proxy: Any) -> None:
    """Missing, unknown, misshapen, out of range, not a number."""
    good = step_inputs(32, 8, 0, 1, 0)
    assert proxy.predict(good)["hidden"].shape == (1, 32, 1, 1)
    cases = [
        ({k: v for k, v in good.items() if k != "write"}, "'write' is missing"),
        (good | {"y": good["x"]}, "no input 'y'"),
        (
            good | {"x": np.zeros((1, 31, 1, 1), np.float32)},
            r"'x' has shape \[1, 31, 1, 1\]; allowed: \[1, 32, 1...4, 1\]",
        ),
        (good | {"x": np.zeros((1, 32, 5, 1), np.float32)}, "'x' has shape"),
        (good | {"x": np.zeros((32, 1), np.float32)}, "'x' has shape"),
        (good | {"x": np.full((1, 32, 1, 1), "a")}, "'x' holds"),
    ]
    for data, message in cases:
        with pytest.raises(RuntimeError, match=message):
            proxy.predict(data)


def test_fp16_and_fp32_arrays_are_both_accepted(proxy: Any) -> None:
    """coremltools turns float16 arrays into float32 before the proxy; a caller of the proxy need not."""
    step = step_inputs(32, 8, 0, 2, 0)
    halves = {name: value.astype(np.float16) for name, value in step.items()}
    np.testing.assert_array_equal(proxy.predict(step)["hidden"], proxy.predict(halves)["hidden"])


def test_integer_inputs_take_whole_numbers_only() -> None:
    """A float array may feed an int32 input if nothing is lost."""
    from portable_coreml.errors import InputError
    from portable_coreml.program import TensorType
    from portable_coreml.run.signature import to_tensor

    kind = TensorType("int32", (2,))
    assert to_tensor(np.array([1.0, -2.0]), kind, "ids", half=False).tolist() == [1, -2]
    with pytest.raises(InputError, match="'ids' holds fractions"):
        to_tensor(np.array([1.0, 0.5]), kind, "ids", half=False)


def test_enumerated_shapes_are_checked() -> None:
    """Only the listed shapes pass."""
    from portable_coreml.errors import InputError
    from portable_coreml.files.features import Feature

    feature = Feature("x", "fp32", (1, 4), choices=((1, 4), (1, 8)))
    feature.check((1, 8))
    with pytest.raises(InputError, match=r"\[1, 6\]"):
        feature.check((1, 6))


def test_scalars_come_back_with_one_element(build_program: Any) -> None:
    """Core ML has no outputs of rank 0."""
    from coremltools.converters.mil import Builder as mb

    model = build_program(lambda x: mb.reduce_sum(x=x, axes=[0], keep_dims=False), {"x": (3,)})
    assert list(model.predict({"x": np.ones(3, np.float32)}).values())[0].shape == (1,)


def test_arrays_may_lie_in_memory_in_any_order(proxy: Any) -> None:
    """Tokens first, as a table's rows do, without a copy; backwards or with gaps, with one."""
    from portable_coreml.program import TensorType
    from portable_coreml.run.signature import to_tensor

    step = step_inputs(32, 8, 0, 3, 0)
    expected = proxy.predict(step)["hidden"]
    x, kind = step["x"], TensorType("fp32", (1, 32, None, 1))
    tokens_first = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert to_tensor(tokens_first, kind, "x", half=False).data_ptr() == tokens_first.ctypes.data
    backwards = x[:, :, ::-1].copy()[:, :, ::-1]
    gaps = np.repeat(x, 2, axis=2)[:, :, ::2]
    for array in (tokens_first, backwards, gaps):
        limits.numbers_agree(
            "hidden", proxy.predict(step | {"x": array})["hidden"], expected, limits.sums("fp32", 32, 5)
        )
