"""Quantisers: they err less than rounding, keep what the forms promise, and are coremltools' own GPTQ."""

from __future__ import annotations

import limits
import pytest
import torch
from coremltools.optimize.torch.layerwise_compression.algorithms import GPTQ, ModuleGPTQConfig
from torch import Tensor, nn

from shardmill.precision import quantisers
from shardmill.precision.quantisers import QuantizedMatrix, clipped, error, gptq

ROWS, COLUMNS, SAMPLES = 24, 64, 400


def draw(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights with a few large ones in every row, and correlated inputs [samples, columns], some of them large."""
    at = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=at)
    weight[:, ::13] *= 4
    mixing = torch.randn(COLUMNS, COLUMNS, generator=at) * torch.linspace(3, 0.05, COLUMNS)[:, None]
    return weight, torch.randn(SAMPLES, COLUMNS, generator=at) @ mixing


def plain(weight: Tensor, bits: int) -> QuantizedMatrix:
    """Rounding to nearest, with nothing cut off."""
    high = 2 ** (bits - 1) - 1
    scale = (weight.abs().amax(dim=1) / high).half()
    return QuantizedMatrix((weight / scale.float()[:, None]).round().clamp(-high - 1, high).to(torch.int8), scale)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_in_range_and_scales_are_positive_fp16(bits: int) -> None:
    weight, x = draw()
    weight[3] = 0  # a row that nothing is known of
    for found in (clipped(weight, bits), gptq(weight, bits, x.T @ x)):
        assert found.codes.dtype == torch.int8 and found.scale.dtype == torch.float16
        assert -(2 ** (bits - 1)) <= int(found.codes.min()) and int(found.codes.max()) <= 2 ** (bits - 1) - 1
        assert (found.scale > 0).all() and found.values[3].abs().max() == 0


@pytest.mark.parametrize("seed", range(3))
def test_scales_that_cut_off_err_less_than_rounding_and_gptq_errs_least(seed: int) -> None:
    weight, x = draw(seed)
    h = x.T @ x
    rounded, cut, weighed, best = (
        error(weight, found.values, h)
        for found in (plain(weight, 4), clipped(weight, 4), clipped(weight, 4, h.diagonal()), gptq(weight, 4, h))
    )
    assert best < 0.5 * min(weighed, cut) and max(weighed, cut) < rounded


def test_the_error_is_that_of_the_outputs() -> None:
    weight, x = draw()
    found = clipped(weight, 4)
    outputs, changed = x @ weight.T, x @ found.values.T
    expected = float((outputs - changed).square().sum() / outputs.square().sum())
    limits.numbers_agree("the error", error(weight, found.values, x.T @ x), expected, limits.sums("fp32", x.numel()))


@pytest.mark.parametrize("weighed", [False, True])
def test_a_scale_is_the_best_of_those_that_are_tried(weighed: bool) -> None:
    """No row could have done better with the scale of another ratio, an error counting as much as its column does."""
    weight, x = draw()
    importance = (x.T @ x).diagonal() if weighed else None
    found, full = clipped(weight, 4, importance), weight.abs().amax(dim=1) / 7
    counts = torch.ones(COLUMNS) if importance is None else importance

    def errors(values: Tensor) -> Tensor:
        return (values - weight).square() @ counts

    for ratio in torch.linspace(1, quantisers.LEAST_RATIO, quantisers.RATIOS).tolist():
        other = quantisers._rounded(weight, (full * ratio).half().float(), 4)
        assert (errors(found.values) <= errors(other.values) * (1 + limits.sums("fp32", COLUMNS).value)).all()
    assert not weighed or not torch.equal(found.scale, clipped(weight, 4).scale)


def test_the_scales_of_gptq_follow_the_inputs() -> None:
    """An error of a column counts as its inputs do: these are the scales of the search with their squares."""
    weight, x = draw()
    h = x.T @ x
    assert torch.equal(gptq(weight, 4, h).scale, clipped(weight, 4, h.diagonal()).scale)
    assert not torch.equal(gptq(weight, 4, h).scale, clipped(weight, 4).scale)


def test_gptq_is_coremltools_own_with_our_scales() -> None:
    """Fed with the inputs themselves in a batch, as its compressor does it."""
    weight, x = draw()
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    theirs = GPTQ(layer, ModuleGPTQConfig(weight_dtype="uint4", use_activation_order_heuristic=True))
    theirs.add_batch(x, layer(x))
    scale = clipped(weight, 4, (x.T @ x).diagonal()).scale.float()[:, None]
    theirs._quantizer.scale, theirs._quantizer.zero_point = scale, torch.full_like(scale, 8.0)
    theirs._store_quantization_params(theirs._quantizer)
    theirs.compress()
    ours = gptq(weight, 4, x.T @ x)
    limits.numbers_agree("values", ours.values, layer.weight, limits.roundings("fp32", 4))


def test_the_same_codes_every_time() -> None:
    weight, x = draw()
    h = x.T @ x
    one, other = gptq(weight, 4, h), gptq(weight.clone(), 4, h.clone())
    assert torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)


def test_what_is_given_stays_as_it_is() -> None:
    weight, x = draw()
    h = x.T @ x
    before = weight.clone(), h.clone()
    gptq(weight, 4, h)
    assert torch.equal(weight, before[0]) and torch.equal(h, before[1])


@pytest.mark.parametrize("seen", [0, 3])
def test_weights_of_inputs_that_were_never_there_stay(seen: int) -> None:
    """The algorithm itself sets them to zero, though a text to come may have such an input."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(5, 8), torch.randn(64, 8)
    inputs[:, seen:] = 0
    found = gptq(weight, 4, inputs.T @ inputs)
    step = found.scale.float()[:, None]
    assert (
        (found.values - weight)[:, seen:].abs()
        <= (step / 2 + (weight.abs() - 7 * step).clamp(min=0)[:, seen:]) * (1 + limits.roundings("fp32", 4).value)
    ).all()
