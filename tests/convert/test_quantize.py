"""Codes and scales of INT8 and INT4 are coremltools', bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coremltools.optimize.coreml._quantization_passes import linear_quantize_weights
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardmill.convert.palette import fits_fp16, to_fp16, to_integers

BITS = {4: 7, 8: 127}  # with their levels


def reference(rows: torch.Tensor, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """coremltools' own quantisation of the fp16 weights."""
    weights = rows.float().numpy().astype(np.float16)[:, :, None, None]
    with np.errstate(all="ignore"):
        made = linear_quantize_weights.blockwise_compress(weights, bits, "LINEAR_SYMMETRIC", True, [1, 0, 0, 0])
    return made.data[:, :, 0, 0], made.scale[:, 0, 0, 0]


def assert_same(rows: torch.Tensor) -> None:
    for bits, levels in BITS.items():
        codes, scale, magnitude = to_integers(rows, levels)
        wanted_codes, wanted_scale = reference(rows, bits)
        assert magnitude == float(rows.abs().max())
        assert np.array_equal(scale.numpy().view(np.uint16), wanted_scale.view(np.uint16))
        assert np.array_equal(codes.numpy(), wanted_codes)


finite = arrays(np.uint16, (4, 24)).map(lambda bits: np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits))


@given(finite)
def test_any_fp16_weights(bits: np.ndarray) -> None:
    assert_same(torch.from_numpy(bits.astype(np.uint16).view(np.float16).copy()))


@given(finite, st.integers(-14, 8))
def test_rows_of_one_magnitude(bits: np.ndarray, power: int) -> None:
    """Where most levels are used, and halves are rounded to even."""
    values = (bits & 0x83FF | 0x3C00).astype(np.uint16).view(np.float16).astype(np.float32) * 2.0**power
    assert_same(torch.from_numpy(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_as_models_have_them(dtype: torch.dtype) -> None:
    rows = torch.randn(64, 3072, generator=torch.Generator().manual_seed(3)) * 0.02
    assert_same(rows.to(dtype))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([0.0, 0.0, 0.0], id="zeros"),
        pytest.param([-0.0, -0.0, -0.0], id="negative zeros"),
        pytest.param([0.0, -0.0, 0.0], id="zeros of both signs"),
        pytest.param([1e-7, -6e-8, 0.0], id="too small for a scale"),
        pytest.param([1e-5, -3e-6, 1e-5], id="a subnormal scale"),
        pytest.param([40000.0, -3.0, 1.0], id="twice the largest overflows fp16"),
        pytest.param([127.0, 0.5, 1.5], id="halves"),
        pytest.param([65504.0, -65504.0, 65504.0], id="the largest fp16"),
    ],
)
def test_rows_at_the_edges_of_fp16(row: list[float]) -> None:
    assert_same(torch.tensor([row, [1.0, 2.0, 3.0]]))
    assert_same(torch.tensor([row * 32] * 32))  # where PyTorch takes its vectorised path


def test_fp16_rounds_to_nearest_even_and_keeps_subnormals() -> None:
    rows = torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11, 6e-8, -0.0]])
    stored, magnitude = to_fp16(rows)
    assert np.array_equal(stored.numpy().view(np.uint16), rows.numpy().astype(np.float16).view(np.uint16))
    assert magnitude == 1 + 3 * 2**-11


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 65505.0, -70000.0])
@pytest.mark.parametrize("encode", [to_fp16, to_integers])
def test_what_fp16_cannot_hold_shows_in_the_magnitude(encode: object, value: float) -> None:
    rows = torch.tensor([[1.0, 2.0], [value, 1.0], [3.0, 4.0]])
    assert not fits_fp16(encode(rows)[-1])  # type: ignore[operator]
    assert fits_fp16(65504.0)
