"""Gated DeltaNet: what transformers computes, whatever is rejected, and each mistake of a port is found out."""

from __future__ import annotations

from typing import Any

import limits
import numpy as np
import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
from kit_runner.figures import relative_error
from torch import Tensor

from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models import delta_net
from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import BLOCK, DECAY_SCALE, GraphSpec
from shardmill.models.delta_net import GatedDeltaNet, Solved, substituted
from shardmill.models.families.qwen3_5_text import KINDS
from shardmill.models.primitives import L2Norm, RMSNorm, softplus
from shardmill.models.recurrences import DeltaNet

from .recurrent_layers import LONG, WIDE, Mistake, block_mistakes, fed, folded_twice, in_fp64
from .test_family_mutants import error
from .tiny_configs import tiny_config

LIMIT, TEXT = THRESHOLDS["program_error"].limit, 96
SIZES = DeltaNet(key_heads=2, value_heads=6, key_dim=32, value_dim=64, taps=4)
SPEC = GraphSpec(
    "layers", Graph(64, 4, 2, 32, 8, 96, 1e-6, delta=SIZES), ((0, KINDS["linear_attention"]),), slots=TEXT + BLOCK
)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' layer in fp64, with heads that forget slowly and heads that forget at once."""
    config = tiny_config(
        "qwen3_5_text", rms_norm_eps=1e-6, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32
    )
    torch.manual_seed(0)
    layer = in_fp64(qwen3_5).Qwen3_5GatedDeltaNet(config, 0).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
            weight.add_(1.0 if name == "norm.weight" else 0.0)
        layer.A_log.uniform_(-4, 2.7, generator=generator)
    return layer


def ours(layer: Any) -> GatedDeltaNet:
    """Our layer of the same weights in fp64, with the constants that need not fit fp16 then."""
    found = dict(layer.state_dict())
    taps = found.pop("conv1d.weight")[:, 0]
    weights = {f"tap_{j}": taps[:, j] for j in range(SIZES.taps)}
    weights["in_proj_ba.weight"] = torch.cat([found.pop("in_proj_b.weight"), found.pop("in_proj_a.weight")])
    weights["rate"] = -DECAY_SCALE * found.pop("A_log").exp()
    mixer = GatedDeltaNet(SPEC.graph, LayerSpec("delta"), {**weights, **found}, "").double()
    mixer.unit.root_eps.fill_(1e-3)
    mixer.norm.root_eps.fill_(1e-3 * delta_net.Q_SCALE * delta_net.V_SCALE)
    mixer.norm.factors = []
    return mixer


def draw(count: int = TEXT) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that need not fit fp16."""
    monkeypatch.setattr(delta_net, "scale", lambda x, factor: x * factor)
    monkeypatch.setattr(delta_net, "softplus", torch.nn.functional.softplus)


def exactly(tokens: int) -> limits.Limit:
    """The longest projection has 6 * 64 products; a state takes each token's sum on top of the last."""
    return limits.sums("fp64", 6 * 64, tokens)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("seed", range(3))
def test_the_arithmetic_is_transformers_own(theirs: Any, seed: int) -> None:
    """In fp64, with rejected drafts, where only the order of sums differs."""
    x = draw()
    with torch.no_grad():
        expected = theirs(x[None])[0]
    limits.rows_agree(f"seed {seed}", fed(ours(theirs), x, SPEC, seed), expected, exactly(len(x)))


@pytest.mark.usefixtures("exact")
def test_a_long_text_in_passes_of_one_token(theirs: Any) -> None:
    """As it is decoded: a fold for every eight tokens."""
    x = draw()
    with torch.no_grad():
        expected = theirs(x[None])[0]
    limits.rows_agree("one token a pass", fed(ours(theirs), x, SPEC, 0, widths=(1,)), expected, exactly(len(x)))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("widths", [(WIDE,), (1, 3, WIDE), (8, 16, 24, WIDE)], ids=str)
def test_passes_of_several_blocks_are_transformers_own(theirs: Any, widths: tuple[int, ...]) -> None:
    """Alone and among others, filled up, with rejected tokens in the last block."""
    x = draw(LONG)
    with torch.no_grad():
        expected = theirs(x[None])[0]
    for seed in range(3):
        limits.rows_agree(f"seed {seed}", fed(ours(theirs), x, SPEC, seed, widths), expected, exactly(len(x)))


# The pieces in fp16 and at small numbers.


def test_softplus_is_right_in_fp16_where_a_head_forgets_next_to_nothing() -> None:
    """And where log(1 + exp(x)) would overflow."""
    x = torch.linspace(-9, 60, 4001).half().reshape(1, 1, 1, -1)
    expected = torch.nn.functional.softplus(x.double())
    limits.numbers_agree("in fp16", softplus(x), expected, limits.roundings("fp16", 4), size=expected)
    off = float(((softplus(x.float()).double() - expected).abs() / expected).max())
    assert off < 2.9e-6 + limits.roundings("fp32", 4).value  # the polynomial's own error, as its docstring has it


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0, 1e3])
def test_the_epsilon_of_the_l2_norm_is_added_to_the_sum(size: float) -> None:
    """Not to the mean, which shows only at numbers as small as after the convolution."""
    x = size * torch.randn(1, 3, 5, 32, generator=torch.Generator().manual_seed(0))
    expected = qwen3_5.l2norm(x, dim=-1, eps=1e-6)
    limits.rows_agree("L2 norm", L2Norm()(x)[0, 0], expected[0, 0], limits.sums("fp32", 32, 2))
    by_mean = x * torch.rsqrt((x * x).mean(3, keepdim=True) + 1e-6) * x.shape[3] ** -0.5
    assert size >= 1 or relative_error(by_mean[0, 0], expected[0, 0]) > 1e-3
    assert not L2Norm()(torch.zeros(1, 1, 1, 32)).any()


@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_the_norm_of_scaled_heads_stays_in_the_range_of_fp16(eps: float) -> None:
    """Its epsilon is a million times the model's, and would overflow once divided by the square of a small number."""
    norm = RMSNorm(torch.ones(64), eps * (delta_net.Q_SCALE * delta_net.V_SCALE) ** 2, axis=3).half()
    for size in (1e-2, 1.0, 1e3):
        x = size * torch.randn(1, 4, 8, 64, generator=torch.Generator().manual_seed(0)).half()
        expected = torch.nn.functional.rms_norm(x.double() / 1024, (64,), eps=eps)
        limits.rows_agree(f"size {size}", norm(x)[0, 0], expected[0, 0], limits.roundings("fp16", 6))


def test_forward_substitution_inverts() -> None:
    """Also if all keys are alike, where the inverse has large numbers of both signs."""
    i, j = np.mgrid[0:BLOCK, 0:BLOCK]
    lower = torch.from_numpy(np.where(i > j, 0.99, 0.0))[None, None]
    x = torch.randn(1, 1, BLOCK, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.linalg.solve(torch.eye(BLOCK, dtype=torch.float64) + lower, x)
    limits.numbers_agree("inverse", substituted(lower, x), expected, limits.sums("fp64", BLOCK, BLOCK))


# Mistakes, each on the whole tiny model with rejected drafts.


def decayed_after(real: Any) -> Any:
    """The state decays after a token is added, its own update too."""

    def solved(self: Any, *given: Any) -> Any:
        *heads, constants, n = given
        later = constants["later"]
        sums = torch.cat([later, later.transpose(2, 3) + torch.eye(BLOCK)], dim=2) / DECAY_SCALE
        return real(self, *heads, {**constants, "decay_sums": sums}, n)

    return solved


def without_beta(real: Any) -> Any:
    def heads(self: Any, windows: Tensor, n: int) -> Any:
        q, k, v, beta, decay = real(self, windows, n)
        return q, k, v, torch.ones_like(beta), decay

    return heads


def gated_before(_: Any) -> Any:
    """The gate before the norm, as Mamba 2 has it."""
    silu = torch.nn.functional.silu
    return lambda self, y, gate: self.norm(y * silu(gate).transpose(2, 3)).transpose(2, 3)


def without_correction(_: Any) -> Any:
    """Gated linear attention: what a key already reads from the state is not taken off."""

    def folded(self: Any, state: Tensor, block: Solved, goes_on: Tensor) -> Tensor:
        kept = state * (1 - (block.lost * goes_on + (1 - goes_on)))
        return kept + torch.matmul((block.k * block.until).transpose(2, 3), block.u)

    return folded


def plain_epsilon(real: Any) -> Any:
    def init(self: Any, g: Graph, kind: LayerSpec, weights: Any, path: str) -> None:
        real(self, g, kind, weights, path)
        self.norm = RMSNorm(weights[f"{path}norm.weight"], g.rms_norm_eps, axis=3)  # not scaled with queries and values

    return init


def tiled(x: Tensor, n: int, key_heads: int, value_heads: int, sizes: tuple[int, int]) -> Tensor:
    """Key heads in the order of GGUF's weights."""
    return torch.cat([x] * (value_heads // key_heads), dim=1)


MISTAKES: dict[str, Mistake] = {
    "a state folded twice": (GatedDeltaNet, "folded", folded_twice),
    "decay after the update": (GatedDeltaNet, "solved", decayed_after),
    "no beta": (GatedDeltaNet, "heads", without_beta),
    "no l2 norm": (L2Norm, "forward", lambda _: lambda self, x: x),
    "the gate before the norm": (GatedDeltaNet, "gated", gated_before),
    "no correction by the state": (GatedDeltaNet, "folded", without_correction),
    "an inverse of one term": (delta_net, "substituted", lambda _: lambda n, x: x - n @ x),
    "key heads in turn": (delta_net, "spread", lambda _: tiled),
    "no scale of the norm's epsilon": (GatedDeltaNet, "__init__", plain_epsilon),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_recurrence_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    assert error("qwen3_5_text") > LIMIT


BLOCK_MISTAKES = block_mistakes(delta_net, GatedDeltaNet)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", BLOCK_MISTAKES)
def test_a_mistake_with_several_blocks_is_found_out(theirs: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = BLOCK_MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    x = draw(LONG)
    with torch.no_grad():
        expected = theirs(x[None])[0]
    assert relative_error(fed(ours(theirs), x, SPEC, 0, (3, WIDE)), expected) > LIMIT
