"""Mamba-2: what transformers computes, whatever is rejected, and each mistake of a port is found out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import limits
import numpy as np
import pytest
import torch
import transformers.models.granitemoehybrid.modeling_granitemoehybrid as granite
from kit_runner.figures import relative_error
from numpy.typing import NDArray
from torch import Tensor

from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models import mamba
from shardmill.models.architecture import Graph, ModelDescription
from shardmill.models.contract import BLOCK, DECAY_SCALE, GraphSpec
from shardmill.models.families.granitemoehybrid import MAMBA_LAYER
from shardmill.models.mamba import MambaMixer
from shardmill.models.primitives import RMSNorm
from shardmill.models.recurrences import Mamba2

from .recurrent_layers import (
    HEAD,
    LONG,
    RATES,
    TOKENS,
    WIDE,
    WIDTHS,
    Mistake,
    block_mistakes,
    errors_in_fp16,
    fed,
    folded_twice,
    in_fp64,
    stay_small,
)
from .test_family_mutants import Mutation, error, graph, sources, swapped
from .tiny_configs import tiny_config

LIMIT, TEXT, HIDDEN, EPS = THRESHOLDS["program_error"].limit, 96, 64, 1e-3
SIZES = {  # one group, as Granite's; groups, and a least step that many tokens have, as Nemotron's
    "one group": Mamba2(heads=4, groups=1, head_dim=32, state_dim=64, taps=4),
    "groups": Mamba2(heads=8, groups=4, head_dim=16, state_dim=32, taps=3, conv_bias=False, least_step=0.2),
}


def layer(sizes: Mamba2, hidden: int = HIDDEN) -> Any:
    """transformers' layer in fp64, with heads that forget slowly and heads that forget at once."""
    changes: dict[str, Any] = {"mamba_conv_bias": sizes.conv_bias, "time_step_limit": (sizes.least_step, float("inf"))}
    changes |= {"mamba_n_heads": sizes.heads, "mamba_n_groups": sizes.groups, "mamba_d_head": sizes.head_dim}
    changes |= {"mamba_d_state": sizes.state_dim, "mamba_d_conv": sizes.taps, "mamba_chunk_size": 16}
    changes |= {"mamba_expand": sizes.width // hidden}
    config = tiny_config("granitemoehybrid", hidden_size=hidden, rms_norm_eps=EPS, **changes)
    torch.manual_seed(0)
    found = in_fp64(granite).GraniteMoeHybridMambaLayer(config, 0).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
            weight.add_(1.0 if name == "norm.weight" else 0.0)
        found.A_log.uniform_(-4, 2.7, generator=generator)
    return found


def ours(layer: Any, sizes: Mamba2, hidden: int = HIDDEN, text: int = TEXT) -> tuple[MambaMixer, GraphSpec]:
    """Our layer of the same weights in fp64, with the constants that need not fit fp16 then."""
    graph = Graph(hidden, 4, 2, 32, 8, 96, EPS, mamba=sizes)
    spec = GraphSpec("layers", graph, ((0, MAMBA_LAYER),), slots=text + BLOCK)
    found = dict(layer.state_dict())
    gate, xbc, dt = found.pop("in_proj.weight").split([sizes.width, sizes.mixed, sizes.heads])
    weights = {"in_proj_z.weight": gate, "in_proj_xbc.weight": xbc, "in_proj_dt.weight": dt}
    taps = found.pop("conv1d.weight")[:, 0]
    weights |= {f"tap_{j}": taps[:, j] for j in range(sizes.taps)}
    weights |= {"conv_bias": found.pop("conv1d.bias")} if sizes.conv_bias else {}
    weights |= {"rate": -found.pop("A_log").exp(), "skip": DECAY_SCALE * found.pop("D")}
    mixer = MambaMixer(spec.graph, MAMBA_LAYER, {**weights, **found}, "").double()
    mixer.norm.root_eps.fill_(EPS**0.5)
    mixer.norm.factors = []
    return mixer, spec


def draw(count: int = TEXT) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that need not fit fp16."""
    monkeypatch.setattr(mamba, "scale", lambda x, factor: x * factor)
    monkeypatch.setattr(mamba, "softplus", torch.nn.functional.softplus)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("widths", [WIDTHS, (1,), (WIDE,), (1, 3, WIDE), (8, 16, 24, WIDE)], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_the_arithmetic_is_transformers_own(name: str, widths: tuple[int, ...]) -> None:
    """In fp64, with rejected drafts, where only the order of sums differs; passes of several blocks are filled up."""
    sizes, x = SIZES[name], draw(LONG if WIDE in widths else TEXT)
    theirs = layer(sizes)
    mixer, spec = ours(theirs, sizes)
    with torch.no_grad():
        expected = theirs(x[None])[0]
        steps = torch.nn.functional.softplus(x @ theirs.in_proj.weight[-sizes.heads :].T + theirs.dt_bias)
    assert not sizes.least_step or 0.1 < (steps < sizes.least_step).double().mean() < 0.9
    # The longest projection has 128 products; a state takes each token's sum on top of the last.
    limit = limits.sums("fp64", 128, len(x))
    for seed in range(3):
        limits.rows_agree(f"seed {seed}", fed(mixer, x, spec, seed, widths), expected, limit)


def test_a_head_that_forgets_at_once_stays_finite_in_fp16() -> None:
    """Where a step times a rate is beyond fp16, and would be infinity times 0."""
    sizes = SIZES["one group"]
    mixer, spec = ours(layer(sizes), sizes)
    mixer.rate.fill_(-200.0)
    mixer.dt_bias.fill_(6.0)
    found = fed(mixer.half(), 0.1 * draw()[:40].half(), spec, 0)
    assert torch.isfinite(found).all() and found.abs().max() > 0.01


# Mistakes, each on the whole tiny model with rejected drafts.


def sized(**changes: Any) -> Mutation:
    """Other options of the Mamba-2 layers."""

    def changed(model: ModelDescription) -> ModelDescription:
        assert (sizes := model.architecture.graph.mamba) is not None
        return graph(mamba=replace(sizes, **changes))(model)

    return changed


MUTANTS: dict[str, Mutation] = {
    "no D": sources("mamba.skip", times=0.0),
    "D not scaled with the state": sources("mamba.skip", times=1.0),
    "no bias of steps": sources("mamba.dt_bias", times=0.0),
    "no least step": sized(least_step=0.0),
    "no bias of the convolution": sized(conv_bias=False),
    "taps in reverse": swapped("mamba.tap_0", "mamba.tap_3"),
    "one group": sized(groups=1, state_dim=64),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_the_description_is_found_out(name: str) -> None:
    assert error("granitemoehybrid", MUTANTS[name]) > LIMIT


def decayed_after(real: Any) -> Any:
    """The state decays after a token is added, its own update too."""

    def decayed(decay: Tensor, n: int, heads: int, constants: Any) -> Any:
        causal = constants["causal"]
        sums = torch.cat([causal * (1 - causal.transpose(2, 3)), causal.transpose(2, 3)], dim=2) / DECAY_SCALE
        return real(decay, n, heads, {**constants, "decay_sums": sums})

    return decayed


def steps_as_they_are(_: Any) -> Any:
    """An update without its step."""

    def change(self: MambaMixer, state: Tensor, u: Tensor, b: Tensor, lost: Tensor) -> Tensor:
        return state * lost - torch.matmul((u != 0).float().transpose(2, 3), b)

    return change


def normed_before(_: Any) -> Any:
    """The norm before the gate, as gated DeltaNet has it."""

    def gated(self: MambaMixer, y: Tensor, gate: Tensor) -> Any:
        groups, width = self.sizes.groups, self.sizes.width
        y = y.transpose(2, 3).reshape(1, groups, width // groups, -1) * mamba.GATE_SCALE
        return self.norm(y).reshape(1, width, -1, 1) * torch.nn.functional.silu(gate)

    return gated


def normed_together(_: Any) -> Any:
    """One norm over the heads of all groups."""

    def gated(self: MambaMixer, y: Tensor, gate: Tensor) -> Any:
        y = y.transpose(2, 3).reshape(1, self.sizes.width, -1, 1) * torch.nn.functional.silu(gate)
        gains = self.norm.weight
        assert gains is not None
        return RMSNorm(None, EPS)(y * mamba.GATE_SCALE) * gains.reshape(1, -1, 1, 1)

    return gated


def in_turn(_: Any) -> Any:
    """Heads take their groups in turn."""
    return lambda self, x, factors, *_: x.repeat(1, self.sizes.heads // self.sizes.groups, 1, 1) * factors


def exchanged(real: Any) -> Any:
    """B in the place of C."""

    def heads(self: MambaMixer, windows: Tensor, n: int) -> Any:
        x, b, c, dt = real(self, windows, n)
        return x, c, b, dt

    return heads


MISTAKES: dict[str, Mistake] = {
    "a state folded twice": (MambaMixer, "folded", folded_twice),
    "decay after the update": (mamba, "decayed", decayed_after),
    "no steps in the update": (MambaMixer, "change", steps_as_they_are),
    "the norm before the gate": (MambaMixer, "gated", normed_before),
    "a norm over all groups": (MambaMixer, "gated", normed_together),
    "groups in turn": (MambaMixer, "spread", in_turn),
    "B and C exchanged": (MambaMixer, "heads", exchanged),
    "a gate that is not scaled": (mamba, "GATE_SCALE", lambda real: 1.0),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_recurrence_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, change = MISTAKES[name]
    monkeypatch.setattr(owner, method, change(getattr(owner, method)))
    assert error("granitemoehybrid") > LIMIT


BLOCK_MISTAKES = block_mistakes(mamba, MambaMixer)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", BLOCK_MISTAKES)
def test_a_mistake_with_several_blocks_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = BLOCK_MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    sizes, x = SIZES["groups"], draw(LONG)
    theirs = layer(sizes)
    with torch.no_grad():
        expected = theirs(x[None])[0]
    mixer, spec = ours(theirs, sizes)
    assert relative_error(fed(mixer, x, spec, 0, (3, WIDE)), expected) > LIMIT


# In emulated fp16.


def measured(width: int) -> NDArray[np.float64]:
    """The error of each head in each quarter of a text; see `errors_in_fp16`."""
    sizes = Mamba2(heads=len(RATES), groups=len(RATES), head_dim=HEAD, state_dim=64, taps=4)
    hidden = sizes.width
    theirs = layer(sizes, hidden).float()
    with torch.no_grad():  # of the sizes that a new model has; each head has a norm of its own
        for name, weight in theirs.named_parameters():
            weight.normal_(0, hidden**-0.5 if name.startswith("in_proj") else 0.15)
        theirs.norm.weight.fill_(1)
        theirs.D.fill_(1)
        theirs.dt_bias.fill_(float(np.log(np.expm1(0.05))))
        theirs.A_log.copy_((torch.tensor(RATES) / 0.05).log())
        theirs.out_proj.weight.copy_(torch.eye(hidden))
    ours_of = partial(ours, sizes=sizes, hidden=hidden, text=TOKENS)
    return errors_in_fp16(theirs, ours_of, lambda layer, x: layer(x[None])[0], width)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 8, WIDE])
def test_errors_in_fp16_stay_small(width: int) -> None:
    """They are flat in heads that forget; others add up the roundings of their state, one for eight tokens."""
    stay_small(measured(width))


@pytest.mark.slow
def test_a_share_that_is_kept_in_place_of_the_share_that_is_lost_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since fp16 has no number between 1 and 1 - 2^-11."""

    def folded(self: MambaMixer, state: Tensor, u: Tensor, b: Tensor, lost: Tensor, goes_on: Tensor) -> Tensor:
        return state * ((1 - lost) * goes_on) + torch.matmul(u.transpose(2, 3), b)

    monkeypatch.setattr(MambaMixer, "folded", folded)
    with pytest.raises(AssertionError, match="a head that forgets 0.0001: the error 0.0"):
        stay_small(measured(8))
