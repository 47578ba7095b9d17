"""The blocks of the graph against transformers' own functions, and the norm where fp16 is narrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import limits
import numpy as np
import portable_coreml
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.activations import XIELUActivation as XIELU
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm, apply_rotary_pos_emb, eager_attention_forward

from shardmill.errors import CheckpointError
from shardmill.models.primitives import (
    LayerNorm,
    RMSNorm,
    XIELUActivation,
    apply_rotary,
    attend,
    cap,
    fp16_factors,
    gelu_erf,
    gelu_tanh,
    projection,
    read_ring,
    relu2,
    scale,
    silu_tanh,
    write_cache,
    write_ring,
)

CHANNELS, TOKENS = 96, 4
NORM = limits.sums("fp32", CHANNELS, 2)  # the mean, and what divides by it
SPELLED = 6  # roundings of an activation that is spelled in several operations
# The best of 1,024 products of two fp16 numbers: each is off by up to a unit, the best typically by a thousandth of it.
TWO_FACTORS = 16 * limits.UNITS["fp16"] / 1024


EVERY_HALF = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
EVERY_HALF = EVERY_HALF[EVERY_HALF.isfinite()]  # every finite fp16 number


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norms(eps: float = 1e-5) -> tuple[RMSNorm, Any]:
    """Ours and transformers', with the same weight."""
    weight = 1 + 0.3 * draw(CHANNELS, seed=1)
    theirs = Phi3RMSNorm(CHANNELS, eps=eps)
    theirs.weight.data = weight
    return RMSNorm(weight, eps), theirs


MAGNITUDES = [1e-6, 1e-4, 3e-3, 1e-2, 0.0625, 1.0, 300.0, 5e3, 6e4]


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_rmsnorm_is_transformers_at_every_magnitude(magnitude: float, eps: float) -> None:
    """Below the floor as above it, eps included."""
    ours, theirs = norms(eps)
    x = magnitude * draw(TOKENS, CHANNELS)
    y = ours(x.T[None, :, :, None])[0, :, :, 0].T
    limits.rows_agree("RMSNorm", y, theirs(x), NORM)


@pytest.mark.parametrize("eps", [1e-6, 1e-6 / 64])
def test_rmsnorm_keeps_its_epsilon_in_fp16(eps: float) -> None:
    """A program's constants are fp16. Branches as small as epsilon, which Gemma 3 has, show what that does to it."""
    ours, theirs = norms(eps)
    ours.root_eps = ours.root_eps.half().float()
    x = 0.5 * eps**0.5 * draw(TOKENS, CHANNELS)
    y = ours(x.T[None, :, :, None])[0, :, :, 0].T
    limits.rows_agree("RMSNorm", y, theirs(x), NORM)


def test_rmsnorm_takes_one_constant_where_one_will_do() -> None:
    assert [len(norms(eps)[0].factors) for eps in (1e-5, 1e-6)] == [0, 1]


SMALL = (1e-10, 1e-11, 1e-12, 2.0**-40)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 1e-9, *SMALL, 1e-15, 0.0])
def test_a_norm_of_zeros_is_zero_in_fp16(eps: float) -> None:
    """Zeros fill an encoder's bucket up; NaN there would spoil every token, since 0 * NaN is NaN."""
    weight, zeros = torch.ones(CHANNELS), torch.zeros(1, CHANNELS, TOKENS, 1, dtype=torch.float16)
    for made in (RMSNorm(weight, eps), RMSNorm(None, eps, axis=2), LayerNorm(weight, None, eps)):
        assert torch.equal(made.half()(zeros), zeros)


@pytest.mark.parametrize("eps", SMALL)
@pytest.mark.parametrize("magnitude", [1e-5, 1e-4, 1e-2, 1.0, 6e3])
def test_a_small_epsilon_is_kept_in_fp16(eps: float, magnitude: float) -> None:
    """Also where x is as small as its root, 1e-5 and less."""
    ours, theirs = norms(eps)
    x = (magnitude * draw(TOKENS, CHANNELS)).half()
    y = ours.half()(x.T[None, :, :, None])[0, :, :, 0].T
    limits.rows_agree("RMSNorm in fp16", y, theirs(x.float()), limits.roundings("fp16", SPELLED))


@pytest.mark.parametrize("eps", [*SMALL, 1e-15, 0.0])
def test_a_small_epsilon_takes_no_number_below_fp16_s_normal_ones(eps: float) -> None:
    """The Neural Engine may take these for 0. So may what is added under the root of a column of zeros."""
    ours = RMSNorm(None, eps)
    constants = np.array([float(ours.floor), float(ours.root_eps), *ours.factors])
    assert constants.min() >= 2.0**-14 and np.array_equal(constants.astype(np.float16), constants)
    assert (np.prod(constants[1:]) / constants[0]) ** 2 >= 2.0**-14


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-6 / 64, 1e-6 / 1024, 1e-9])
def test_a_usual_epsilon_keeps_its_constants(eps: float) -> None:
    """Gemma and Qwen divide theirs by the square of what they scale the stream with."""
    ours = RMSNorm(None, eps)
    assert (float(ours.floor), [float(ours.root_eps), *ours.factors]) == (
        2.0**-4,
        pytest.approx(fp16_factors(eps**0.5, 1e-4), rel=limits.roundings("fp32").value),
    )


def test_rmsnorm_does_not_mix_tokens() -> None:
    ours, _ = norms()
    x = draw(1, CHANNELS, TOKENS, 1) * torch.tensor([1e-3, 1.0, 1e3, 0.0])[None, None, :, None]
    together = ours(x)
    alone = torch.cat([ours(x[:, :, t : t + 1]) for t in range(TOKENS)], dim=2)
    limits.rows_agree("tokens together", together[0, :, :, 0].T, alone[0, :, :, 0].T, NORM)
    assert torch.equal(together[:, :, 3], torch.zeros(1, CHANNELS, 1))


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 6e4])
def test_rmsnorm_of_each_head_is_transformers(magnitude: float) -> None:
    """Over axis 2 of [1, heads, head_dim, T]: neither heads nor tokens are mixed."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    weight, x = 1 + 0.3 * draw(32, seed=1), magnitude * draw(1, 3, 32, TOKENS, seed=2)
    x[:, 1] *= 100
    theirs = Qwen3RMSNorm(32, eps=1e-6)
    theirs.weight.data = weight
    ours = RMSNorm(weight, 1e-6, axis=2)(x).transpose(2, 3)
    limits.rows_agree("each head's norm", ours, theirs(x.transpose(2, 3)), limits.sums("fp32", 32, 2))


@pytest.fixture(scope="module")
def norm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RMSNorm alone as a program, T from 1 to 4, as a layer holds it."""
    import coremltools as ct
    from oracle import save

    ours, _ = norms()
    traced = torch.jit.trace(ours, torch.zeros(1, CHANNELS, TOKENS, 1), check_trace=False)
    axis = ct.RangeDim(1, TOKENS, default=1)
    model = ct.convert(
        traced,
        inputs=[ct.TensorType("x", (1, CHANNELS, axis, 1), np.float16)],
        outputs=[ct.TensorType("y", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    path = tmp_path_factory.mktemp("norm") / "norm.mlpackage"
    save(model, path)
    return path


FP16_CASES = {
    "activations of 5e3": 5e3 * draw(TOKENS, CHANNELS, seed=2),
    "one channel at the end of fp16": torch.eye(TOKENS, CHANNELS) * 6e4 + draw(TOKENS, CHANNELS, seed=3),
    "one token of 5e3, one of 1, one of 1e-3": draw(TOKENS, CHANNELS, seed=4) * torch.tensor([[5e3], [1], [1e-3], [1]]),
    "tiny": 1e-3 * draw(TOKENS, CHANNELS, seed=5),
    "tinier than eps": 1e-4 * draw(TOKENS, CHANNELS, seed=6),
}


@pytest.mark.parametrize("case", FP16_CASES)
def test_rmsnorm_survives_fp16(norm_program: Path, case: str) -> None:
    """Every result rounded to fp16, against transformers in fp32 on the same inputs."""
    import coremltools as ct

    portable_coreml.install(precision="fp16")
    model = ct.models.MLModel(str(norm_program), compute_units=ct.ComputeUnit.CPU_AND_NE)
    x = FP16_CASES[case].clamp(-65504, 65504).half().float()
    y = torch.from_numpy(model.predict({"x": x.T[None, :, :, None].numpy()})["y"]).float()[0, :, :, 0].T
    assert y.isfinite().all()
    limits.rows_agree("RMSNorm in fp16", y, norms()[1](x), limits.roundings("fp16", SPELLED))


def test_rmsnorm_of_zeros_is_zero_in_fp16(norm_program: Path) -> None:
    import coremltools as ct

    portable_coreml.install(precision="fp16")
    model = ct.models.MLModel(str(norm_program), compute_units=ct.ComputeUnit.CPU_AND_NE)
    assert not np.any(model.predict({"x": np.zeros((1, CHANNELS, 1, 1), np.float32)})["y"])


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(32, 24), (32, 32), (128, 96), (64, 2)])
def test_rotate_is_transformers(head_dim: int, rope_dim: int) -> None:
    half = rope_dim // 2
    angles = draw(TOKENS, half, seed=1)
    cos, sin = 1.2 * angles.cos(), 1.2 * angles.sin()
    q = draw(1, 3, TOKENS, head_dim, seed=2)
    doubled = (torch.cat([t, t], dim=-1)[None] for t in (cos, sin))
    expected, _ = apply_rotary_pos_emb(q, q, *doubled)
    ours = apply_rotary(q.transpose(2, 3), cos.T, sin.T, (half, head_dim - rope_dim)).transpose(2, 3)
    limits.rows_agree("rotated heads", ours, expected, limits.roundings("fp32", 3))  # two products and their sum
    assert torch.equal(ours[..., rope_dim:], q[..., rope_dim:])


def test_silu_from_tanh_is_silu_for_every_fp16_number() -> None:
    """To fp32's rounding: relative near 0, where the Neural Engine's own table is coarse, and absolute beyond."""
    exact, found = torch.nn.functional.silu(EVERY_HALF.double()), silu_tanh(EVERY_HALF)
    spelled = limits.roundings("fp32", SPELLED)
    limits.numbers_agree("SiLU", found, exact, spelled, size=exact.abs().clamp(min=1))
    near = (EVERY_HALF.abs() < 0.5) & (EVERY_HALF != 0)
    limits.numbers_agree("SiLU near 0", found[near], exact[near], spelled, size=exact[near].abs())


@pytest.mark.parametrize(
    "mutant",
    [
        lambda x: x * (1 - torch.tanh(x * 0.5)) * 0.5,
        lambda x: x * (1 + torch.tanh(x * 0.5)),
        lambda x: x * (1 + torch.tanh(x)) * 0.5,
    ],
    ids=["wrong sign", "no half", "no half inside"],
)
def test_a_silu_from_tanh_that_is_spelled_wrong_shows(mutant: Callable[[Tensor], Tensor]) -> None:
    """Each is off by more than any gate allows."""
    x = draw(1, CHANNELS, TOKENS, 1)
    exact = torch.nn.functional.silu(x)
    limits.rows_agree("SiLU", silu_tanh(x)[0, :, :, 0].T, exact[0, :, :, 0].T, limits.roundings("fp32", SPELLED))
    assert limits.error(mutant(x)[0, :, :, 0].T, exact[0, :, :, 0].T) > 0.1


def test_silu_from_tanh_in_fp16_is_close_near_zero_and_not_in_its_tail() -> None:
    """Every operation rounded: lab/ane-arithmetic.md quotes both figures."""

    def rounded(x: Tensor) -> Tensor:
        return x.half().float()

    found = rounded(EVERY_HALF * rounded(rounded(rounded(rounded(EVERY_HALF * 0.5).tanh()) + 1) * 0.5))
    exact = torch.nn.functional.silu(EVERY_HALF.double())
    near, tail = EVERY_HALF.abs() < 0.5, (EVERY_HALF < -0.5)
    assert bool(found.isfinite().all())
    spelled = limits.roundings("fp16", SPELLED)
    limits.numbers_agree("SiLU near 0", found[near], exact[near], spelled, size=exact[near].abs().clamp(min=2.0**-14))
    # Where tanh is -1 but for a unit, half a unit of 1 is all that is left: times x, up to x = -8.
    error = (found.double() - exact).abs()
    assert 2 * limits.UNITS["fp16"] < float(error[tail].max()) < 4 * limits.UNITS["fp16"]


class Heads(torch.nn.Module):
    """What eager_attention_forward asks of a module."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (6, 2), (4, 4), (24, 8)])
def test_attend_is_transformers(heads: int, kv_heads: int) -> None:
    slots, head_dim, group = 7, 32, heads // kv_heads
    q, k, v = (
        draw(1, heads, TOKENS, head_dim),
        draw(1, kv_heads, slots, head_dim, seed=1),
        draw(1, kv_heads, slots, head_dim, seed=2),
    )
    mask = torch.where(draw(1, 1, TOKENS, slots, seed=3) > 0.3, -1e4, 0.0)
    factor = head_dim**-0.5
    expected, _ = eager_attention_forward(Heads(group), q, k, v, mask, factor)  # [1, T, heads, head_dim]
    grouped = scale(q, factor).reshape(1, kv_heads, group * TOKENS, head_dim)
    ours = attend(grouped, k, v, torch.cat([mask] * group, dim=2)).reshape(1, heads, TOKENS, head_dim)
    limits.rows_agree("attention", ours.transpose(1, 2), expected, limits.sums("fp32", head_dim, 3))


@pytest.mark.parametrize("rows", [1, 5, 8, 11, 12])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_queries_in_pieces_attend_as_all_of_them(rows: int, sinks: bool) -> None:
    """Of every size; sums add up in another order, and exactly where every number and every sum of them is exact."""
    kv_heads, group, slots, head_dim = 2, 3, 16, 32
    q, k, v = (draw(1, kv_heads, n, head_dim, seed=i) for i, n in enumerate((group * TOKENS, slots, slots)))
    mask = torch.where(draw(1, 1, group * TOKENS, slots, seed=3) > 0.3, -1e4, 0.0)
    logits = draw(1, kv_heads * group, 1, 1, seed=4) if sinks else None
    scaled = scale(q, head_dim**-0.5)  # scores of 6 and more would make errors as much larger
    found, expected = (attend(scaled, k, v, mask, 50.0, logits, some) for some in (rows, 0))
    limits.rows_agree("attention", found, expected, limits.sums("fp32", head_dim + slots, 3))
    # Each query sees 1, 2, 4 or 8 slots alike, and weighs them by a power of two.
    seen = torch.arange(group * TOKENS).reshape(-1, 1) % 4
    hidden = torch.where(torch.arange(slots) < 2**seen, 0.0, -1e4).reshape(1, 1, -1, slots)
    keys, values = torch.ones_like(k), torch.arange(float(v.numel())).reshape(v.shape)
    low = torch.full((1, kv_heads * group, 1, 1), -1e4) if sinks else None
    found, expected = (attend(q.round(), keys, values, hidden, 0.0, low, some) for some in (rows, 0))
    assert torch.equal(found, expected)
    assert torch.equal(found[0, 1, 3], values[0, 1, :8].mean(dim=0))


@pytest.mark.parametrize("limit", [50.0, 30.0, 2.0])
def test_capped_scores_are_transformers(limit: float) -> None:
    """The cap comes before the mask, which it would bend otherwise."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma_attention

    q, k, v = (3 * draw(1, 2, n, 32, seed=seed) for seed, n in enumerate((TOKENS, 7, 7)))
    mask = torch.where(draw(1, 1, TOKENS, 7, seed=3) > 0.3, -1e4, 0.0)
    heads = Heads(1).eval()
    expected, _ = gemma_attention(heads, q, k, v, mask, scaling=1.0, softcap=limit)
    largest = min(limit, float((q @ k.transpose(2, 3)).abs().max()))  # what a score is off by, a weight is off by
    allowed = limits.moved(largest * limits.UNITS["fp32"], 32)
    limits.rows_agree("capped attention", attend(q, k, v, mask, limit).transpose(1, 2), expected, allowed)
    assert not torch.allclose(attend(q, k, v, mask).transpose(1, 2), expected, rtol=1e-2)


def test_a_cap_of_zero_is_none() -> None:
    x = 1e3 * draw(8)
    assert torch.equal(cap(x, 0.0), x)
    limits.numbers_agree("capped scores", cap(x, 30.0), 30 * torch.tanh(x / 30), limits.roundings("fp32", 3))


def test_gelu_is_pytorch_s_tanh_approximation_at_every_magnitude() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-6e4, -300.0, 300.0, 6e4])])
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    spelled = limits.roundings("fp32", SPELLED)
    limits.numbers_agree("GELU", gelu_tanh(x), expected, spelled, size=expected.abs().clamp(min=1))


def test_gelu_by_the_error_function_is_pytorch_s_to_a_few_millionths() -> None:
    """docs/families.md says within 4e-6."""
    x = torch.cat([torch.linspace(-12, 12, 40001), torch.tensor([-14.0, 14.0])])
    off = (gelu_erf(x.double()) - torch.nn.functional.gelu(x.double())).abs()
    assert float(off.max()) < 4e-6 and float(off[x.abs() <= 5].max()) < 2e-6  # the polynomial's own error
    spelled = limits.roundings("fp32", 2 * SPELLED)
    limits.numbers_agree("GELU in fp32", gelu_erf(x), gelu_erf(x.double()), spelled, size=x.abs().clamp(min=1))


def test_gelu_stays_in_the_range_of_fp16() -> None:
    """The cube of 41 would already leave it."""
    x = torch.tensor([-6e4, -41.0, 41.0, 6e4], dtype=torch.float16)
    assert torch.equal(gelu_tanh(x), torch.tensor([0.0, 0.0, 41.0, 6e4], dtype=torch.float16))


def test_relu2_is_transformers() -> None:
    x = draw(1, CHANNELS, TOKENS, 1) * 10
    assert torch.equal(relu2(x), ACT2FN["relu2"](x))


def xielus(seed: int) -> tuple[XIELUActivation, Any]:
    """Ours and transformers', with the same learned numbers."""
    theirs = XIELU(dtype=torch.float32)
    theirs.alpha_p.data, theirs.alpha_n.data = draw(2, seed=seed).split(1)
    alpha_p, alpha_n = (torch.nn.functional.softplus(a.data).repeat(CHANNELS) for a in (theirs.alpha_p, theirs.alpha_n))
    return XIELUActivation(alpha_p, alpha_n + theirs.beta), theirs


@pytest.mark.parametrize("magnitude", [1e-5, 1e-3, 0.1, 1.0, 30.0, 1e4])
def test_xielu_is_transformers_at_every_magnitude(magnitude: float) -> None:
    """But for the numbers nearest to 0, which transformers moves to its `eps`."""
    ours, theirs = xielus(seed=3)
    x = draw(1, CHANNELS, TOKENS, 1) * magnitude
    expected = theirs(x)
    moved = x.abs() < -theirs.eps
    size = expected.abs().clamp(min=1)
    found = torch.where(moved, expected, ours(x))
    limits.numbers_agree("xIELU", found, expected, limits.roundings("fp32", SPELLED), size=size)
    assert bool(((ours(x) - expected)[moved].abs() <= -theirs.eps * ours.alpha_n.max()).all())


def test_xielu_keeps_the_digits_of_small_numbers_in_fp16() -> None:
    """Where exp(x) - 1, computed as this difference, would be off by half of the last digit of 1."""
    ours, theirs = xielus(seed=3)
    x = -torch.logspace(-3, -1, CHANNELS).reshape(1, CHANNELS, 1, 1).half()
    found, expected = ours.half()(x).double(), theirs.double()(x.double())
    limits.numbers_agree("xIELU in fp16", found, expected, limits.roundings("fp16", SPELLED), size=expected.abs())
    naive = (torch.exp(x) - 1 - x) * ours.alpha_n + x * 0.5
    assert float(((naive.double() - expected) / expected).abs().max()) > 5e-2


def test_write_cache_puts_each_row_into_its_slot_and_leaves_the_others() -> None:
    cache, new, where = draw(1, 2, 6, 32), draw(1, 2, 3, 32, seed=1), torch.tensor([4, 0, 5])
    mask = torch.zeros(1, 1, 6, 3)
    mask[0, 0, where, torch.arange(3)] = 1
    written = write_cache(cache, new, mask, 1 - mask.sum(dim=3, keepdim=True))
    expected = cache.clone()
    expected[:, :, where] = new
    torch.testing.assert_close(written, expected, rtol=0, atol=0)


def test_write_cache_forgets_what_was_there_however_large() -> None:
    """Also where old values would outweigh the new ones."""
    cache, new = torch.full((1, 1, 2, 32), 6e4), torch.full((1, 1, 1, 32), 2.0**-10)
    mask = torch.tensor([[[[1.0], [0.0]]]])
    written = write_cache(cache, new, mask, 1 - mask.sum(dim=3, keepdim=True))
    assert torch.equal(written[0, 0, 0], new[0, 0, 0])
    assert torch.equal(written[0, 0, 1], cache[0, 0, 1])


def test_write_ring_puts_each_column_into_its_slot_and_leaves_the_others() -> None:
    ring, new, where = draw(1, 1, 5, 32), draw(1, 1, 5, 3, seed=1), torch.tensor([31, 0, 4])
    mask = torch.zeros(1, 1, 3, 32)
    mask[0, 0, torch.arange(3), where] = 1
    written = write_ring(ring, new, mask, 1 - mask.sum(dim=2, keepdim=True))
    expected = ring.clone()
    expected[..., where] = new
    torch.testing.assert_close(written, expected, rtol=0, atol=0)


def test_read_ring_gives_each_token_its_slot_and_zeros_where_there_is_none() -> None:
    ring = draw(1, 1, 5, 32)
    mask = torch.zeros(1, 1, 32, 3)
    mask[0, 0, [7, 31], [0, 2]] = 1
    expected = torch.stack([ring[0, 0, :, 7], torch.zeros(5), ring[0, 0, :, 31]], dim=1)
    assert torch.equal(read_ring(ring, mask, 5)[0, :, :, 0], expected)


@pytest.mark.parametrize("biased", [True, False])
def test_projection_is_a_linear_layer(biased: bool) -> None:
    weight, x, bias = draw(160, CHANNELS), draw(TOKENS, CHANNELS, seed=1), draw(160, seed=2)
    out = projection(weight, bias if biased else None)(x.T[None, :, :, None])[0, :, :, 0].T
    expected = torch.nn.functional.linear(x, weight, bias if biased else None)
    limits.rows_agree("projection", out, expected, limits.sums("fp32", CHANNELS))


MANTISSAS = st.floats(min_value=1, max_value=2, exclude_max=True, allow_nan=False)


@settings(max_examples=300)
@given(mantissa=MANTISSAS, exponent=st.integers(-10, 10))
def test_fp16_factors_hold_any_number_far_better_than_the_gate_asks(mantissa: float, exponent: int) -> None:
    value = mantissa * 2.0**exponent
    factors = fp16_factors(value)
    assert 1 <= len(factors) <= 2
    assert all(float(np.float16(f)) == f for f in factors)
    assert abs(np.prod(np.array(factors, np.float64)) / value - 1) < TWO_FACTORS


@pytest.mark.parametrize("value", [5e-8, 1e-8, -1e-8, 2e5])
def test_a_factor_that_fp16_can_t_make_is_refused(value: float) -> None:
    """A product with 0 in its place would be 0, and nobody would be told."""
    with pytest.raises(CheckpointError, match=f"a factor of {value:g}: no product of two fp16 numbers"):
        fp16_factors(value)
    assert abs(np.prod(fp16_factors(6e-8)) / 6e-8 - 1) < limits.UNITS["fp16"]


@settings(max_examples=100)
@given(bits=st.integers(0x0400, 0x7BFF))
def test_fp16_factors_leave_what_fp16_holds(bits: int) -> None:
    value = float(np.array(bits, np.uint16).view(np.float16))
    assert fp16_factors(value) == (value,)


def test_a_factor_of_one_leaves_no_operation() -> None:
    x = draw(3)
    assert scale(x, 1.0) is x


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_attention_s_scale_is_exact_enough(head_dim: int) -> None:
    """fp16 alone would be off by up to 2e-4, twice what the parity gate allows."""
    x = torch.ones(1, dtype=torch.float64)
    assert abs(float(scale(x, head_dim**-0.5)) / head_dim**-0.5 - 1) < TWO_FACTORS
