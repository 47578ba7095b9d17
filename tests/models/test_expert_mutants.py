"""Mistakes that ports of models with experts have made, most of them in a published port of ZAYA: each is found out.

The sound description of the same model stays within the limit (test_families.py), so it is the mistake that shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import limits
import pytest
import torch
from torch import Tensor, nn

from shardmill.models import attention, blocks, mixture, primitives
from shardmill.models.architecture import ModelDescription, TensorSource
from shardmill.models.architecture import blocks as blocks_of

from .test_family_mutants import LIMIT, Mutation, error, graph, kinds, swapped
from .tiny_configs import BESIDE
from .tiny_families import limit_of, tiny_model


def experts(**changes: Any) -> Mutation:
    """Other options of the experts."""

    def changed(model: ModelDescription) -> ModelDescription:
        found = model.architecture.graph.experts
        assert found is not None
        return graph(experts=replace(found, **changes))(model)

    return changed


def every_class(model: ModelDescription) -> ModelDescription:
    """All experts, weighed by a softmax over all of them: soft routing."""
    found = model.architecture.graph.experts
    assert found is not None
    return experts(chosen=found.classes, choice_bias=False)(model)


def resourced(suffix: str, change: Callable[[TensorSource], TensorSource]) -> Mutation:
    """Other sources of the constants whose paths end in `suffix`."""

    def changed(model: ModelDescription) -> ModelDescription:
        found = {
            path: tuple(map(change, blocks_of(source)))
            for path, source in model.sources.items()
            if path.endswith(suffix)
        }
        assert found
        return replace(model, sources={**model.sources, **found})

    return changed


def halved(source: TensorSource) -> TensorSource:
    """Rows of the first half, where the checkpoint has every other row."""
    assert source.rows is not None
    first, stop, _ = source.rows
    return replace(source, rows=(first * stop // 2, stop // 2 + first * stop // 2, 1))


MUTANTS: dict[str, tuple[str, Mutation]] = {
    "zaya: soft routing": ("zaya", every_class),
    "zaya: weight of the chosen expert is 1": ("zaya", experts(normalised=True)),
    "zaya: no carry": ("zaya", kinds(lambda kind: replace(kind, carries=False))),
    "zaya: no bias in the choice": ("zaya", experts(choice_bias=False)),
    "mixtral: one expert fewer": ("mixtral", experts(chosen=2)),
    "mixtral: one expert more": ("mixtral", experts(chosen=4)),
    "mixtral: weights of all, not of the chosen": ("mixtral", experts(normalised=False)),
    "olmoe: weights brought to a sum of 1": ("olmoe", experts(normalised=True)),
    "qwen3_moe: weights of all, not of the chosen": ("qwen3_moe", experts(normalised=False)),
    "qwen3_moe: magnitudes of shared projections counted twice": (
        "qwen3_moe",
        resourced("down_proj.weight", lambda source: replace(source, magnitude="")),
    ),
    "granitemoe: gate and up exchanged": ("granitemoe", swapped("gate_proj.weight", "up_proj.weight")),
    "lfm2_moe: softmax in place of sigmoid": ("lfm2_moe", experts(scores="softmax")),
    "lfm2_moe: no bias in the choice": ("lfm2_moe", experts(choice_bias=False)),
    "lfm2_moe: weights not scaled": ("lfm2_moe", experts(scale=1.0)),
    "phimoe: softmax of the two in place of SparseMixer": ("phimoe", experts(scores="softmax")),
    "phimoe: no biases of the norms": ("phimoe", graph(norm="rms")),
    "phimoe: no bias of the head": ("phimoe", graph(head_bias=False)),
    "gpt_oss: sinks dropped": ("gpt_oss", graph(sinks=False)),
    "gpt_oss: no bias of the router": ("gpt_oss", experts(router_bias=False)),
    "gpt_oss: gate and up in halves": ("gpt_oss", resourced("_proj.weight", lambda s: halved(s) if s.rows else s)),
    "gpt_oss: gated by silu": ("gpt_oss", experts(swiglu_alpha=0.0)),
}


BESIDE_MUTANTS: dict[str, Mutation] = {
    "the MLP left out": experts(beside=False),
    "gate and up of the MLP exchanged": swapped("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight"),
    "branches not scaled": graph(branch_scale=1.0),
    "weights of all, not of the chosen": experts(normalised=False),
}


@pytest.mark.thorough(but=["the MLP left out", "branches not scaled"])
@pytest.mark.parametrize("name", BESIDE_MUTANTS)
def test_a_mistake_with_experts_beside_an_mlp_and_mamba_is_found_out(name: str) -> None:
    assert error("granitemoehybrid", BESIDE_MUTANTS[name], **BESIDE) > LIMIT
    limits.agrees(
        "without one", error("granitemoehybrid", **BESIDE), limit_of(tiny_model("granitemoehybrid", **BESIDE))
    )


GATED_MUTANTS: dict[str, Mutation] = {
    "the MLP left out": experts(beside=False, beside_gate=False),
    "the MLP's gate left out": experts(beside_gate=False),
    "the gate of another row": resourced("shared_mlp_gate.weight", lambda source: replace(source, times=-1.0)),
    "gate and up of the MLP exchanged": swapped("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight"),
    "gate and up of the experts exchanged": swapped("experts.0.gate_proj.weight", "experts.0.up_proj.weight"),
    "weights of all, not of the chosen": experts(normalised=False),
}


@pytest.mark.thorough(but=["the MLP left out", "the gate of another row", "weights of all, not of the chosen"])
@pytest.mark.parametrize("name", GATED_MUTANTS)
def test_a_mistake_with_experts_beside_a_gated_mlp_is_found_out(name: str) -> None:
    assert error("qwen3_5_moe_text", GATED_MUTANTS[name]) > LIMIT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found_out(name: str) -> None:
    model_type, mutation = MUTANTS[name]
    if name.endswith("router"):
        mutation = _without_router_bias
    assert error(model_type, mutation) > LIMIT


def _without_router_bias(model: ModelDescription) -> ModelDescription:
    return resourced("router.bias", lambda source: replace(source, times=0.0))(model)


ROUTE = mixture.route  # the real one


def _biased_softmax(logits: Tensor, order: Tensor, options: Any, bias: Tensor | None = None) -> Tensor:
    """Adds the choice's bias to the logits."""
    assert bias is not None
    return ROUTE(primitives.add_channels(logits, bias), order, options)


def _scaled_then_shifted(self: Any, branch: Tensor, stream: Tensor) -> Tensor:
    """x * s + b in place of (x + b) * s."""
    branch = primitives.add_channels(branch * self.hidden_states_scale, self.hidden_states_bias)
    return branch + primitives.add_channels(stream * self.residual_scale, self.residual_bias)


def _no_residuals(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    g = self.g
    return torch.zeros(1, g.heads, g.head_dim, q.shape[2]), torch.zeros(1, g.kv_heads, g.head_dim, q.shape[2])


def _current_only(self: Any, before: Tensor, now: Tensor) -> Tensor:
    """Both taps on the current token."""
    return primitives.add_channels(self.tap_0 * now + self.tap_1 * now, self.bias)


def _weight_of_the_choice(logits: Tensor, order: Tensor, options: Any, bias: Tensor | None = None) -> Tensor:
    """The bias counts in the weights, too."""
    assert bias is not None
    scores = primitives.add_channels(torch.sigmoid(logits), bias)
    taken = mixture.top_k_mask(scores, order, options.chosen)
    weights = scores * taken
    return weights / weights.sum(dim=1, keepdim=True) * options.scale


PATCHES: dict[str, tuple[str, object, str, Any]] = {
    "zaya: bias inside the softmax": ("zaya", mixture, "route", _biased_softmax),
    "zaya: router by SiLU": ("zaya", mixture, "gelu_erf", nn.functional.silu),
    "zaya: x * s + b": ("zaya", blocks.ResidualScale, "forward", _scaled_then_shifted),
    "zaya: no state of the convolutions": (
        "zaya",
        attention,
        "read_ring",
        lambda r, m, w: torch.zeros(1, w, m.shape[3], 1),
    ),
    "zaya: convolution over the current token": ("zaya", attention.DepthwisePair, "forward", _current_only),
    "zaya: no mean residual": ("zaya", attention.ConvolvedAttention, "residuals", _no_residuals),
    "zaya: no L2 norm": ("zaya", primitives.UnitNorm, "forward", lambda self, x: x),
    "lfm2_moe: the choice's bias in the weights": ("lfm2_moe", mixture, "route", _weight_of_the_choice),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_mistake_in_a_block_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, owner, attribute, wrong = PATCHES[name]
    monkeypatch.setattr(owner, attribute, wrong)
    assert error(model_type) > LIMIT


def test_a_value_that_is_not_delayed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of ZAYA's value is the token before's."""

    def current(self: Any, x: Tensor, shared: Any, ring: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = sound(self, x, shared, ring)
        both = torch.cat([self.v_proj_current(x), self.v_proj_delayed(x)], dim=1)
        return query, key, both.reshape(1, self.g.kv_heads, self.g.head_dim, -1)

    sound = attention.ConvolvedAttention.convolved
    monkeypatch.setattr(attention.ConvolvedAttention, "convolved", current)
    assert error("zaya") > LIMIT
