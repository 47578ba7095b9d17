"""A mixture of experts as a block of a layer: a router, and all experts, weighted by the router.

If the host routes, the block is the router alone, and groups of experts are separate programs. Inside a program every
expert runs for every token, with weight 0 if the token does not take the expert: a program can't choose which weights
it reads. Experts have separate projections, or a few experts share one projection: then their hidden channels lie
side by side.

Exactly the k best experts are taken, as topk takes them, but without topk, gather, booleans or integers, which leave
the Neural Engine: with differences, clips, maxima and products only. Of equal scores the lower index wins. Scores and
weights are [1, experts, T, 1].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import SILU_TANH, Experts, Graph, LayerSpec
from shardmill.models.contract import GraphSpec
from shardmill.models.primitives import (
    ACTIVATIONS,
    RMSNorm,
    add_channels,
    gelu_erf,
    multiply,
    one_by_one,
    projection,
    scale,
    sigmoid_by_tanh,
    unquantized,
    vector,
)

Weights = Mapping[str, Tensor]

# step() multiplies by 2^15 and clips at 2^-9 in turn. One turn lifts the least fp16 number, 2^-24, to the clip; three
# turns lift 2^-54, which is less than any difference of two fp32 scores of at least 2^-30.
_TURNS = 3
_CLIP, _LIFT = 2.0**-9, 2.0**15
_AWAY = 2e4  # takes a score out of a maximum, within fp16's range
_HIDDEN = 1e4  # takes a logit out of a softmax
_TOLERANCE = 2.0  # of SparseMixer: an expert counts within 2 * eps of the best


def step(difference: Tensor) -> Tensor:
    """Return 1 where a difference is positive, and 0 otherwise.

    Exact for every difference of fp16 numbers, subnormal ones included.
    """
    for _ in range(_TURNS):
        difference = torch.clamp(difference, 0.0, _CLIP) * _LIFT
    return torch.clamp(difference, 0.0, _CLIP) * (1 / _CLIP)


def top_k_mask(scores: Tensor, order: Tensor, chosen: int) -> Tensor:
    """Return 1 for the `chosen` largest scores of every token, and 0 otherwise.

    Args:
        scores: [1, classes, T, 1], of a magnitude far under 2e4.
        order: [1, classes, 1, 1], falling: the larger number wins if scores are equal.
        chosen: how many scores are chosen.
    """
    mask = None
    for _ in range(chosen):
        best_score = scores.amax(dim=1, keepdim=True)  # [1, 1, T, 1]
        hits = (1 - step(best_score - scores)) * order  # more than one where scores are equal
        chosen_expert = 1 - step(hits.amax(dim=1, keepdim=True) - hits)
        scores = scores - chosen_expert * _AWAY
        mask = chosen_expert if mask is None else mask + chosen_expert
    assert mask is not None
    return mask


def route(logits: Tensor, order: Tensor, experts: Experts, bias: Tensor | None = None) -> Tensor:
    """Return the weights of all experts for every token, 0 for experts that the token does not take.

    Args:
        logits: the router's logits, [1, classes, T, 1].
        order: see `top_k_mask`.
        experts: the options of the family's router.
        bias: [1, 1, classes, 1], added to the scores for the choice only.

    Returns:
        [1, experts, T, 1], without the class that stands for no expert.
    """
    if experts.scores == "sparsemixer":
        return _sparsemixer(logits, order, experts)
    scores = torch.sigmoid(logits) if experts.scores == "sigmoid" else torch.softmax(logits, dim=1)
    ranked = logits if experts.scores == "softmax" else scores  # a softmax keeps the order, and merges close logits
    taken = top_k_mask(ranked if bias is None else add_channels(scores, bias), order, experts.chosen)
    if experts.scores == "softmax" and experts.normalised:
        weights = torch.softmax(logits + (taken - 1) * _HIDDEN, dim=1) * taken
    else:
        weights = scores * taken
        if experts.normalised:
            weights = weights / (weights.sum(dim=1, keepdim=True) + experts.normal_eps)
    weights = scale(weights, experts.scale)
    return weights[:, : experts.count] if experts.classes > experts.count else weights


def _sparsemixer(logits: Tensor, order: Tensor, experts: Experts) -> Tensor:
    """Return SparseMixer's weights: a softmax over the experts that come close (arXiv 2409.12136)."""
    weights, left = None, logits
    magnitude = torch.maximum(logits, logits * -1)
    for _ in range(experts.chosen):
        best = left.amax(dim=1, keepdim=True)
        far = step((best - left) - _TOLERANCE * experts.jitter * torch.maximum(magnitude, best))
        hit = top_k_mask(left, order, 1)
        weight = torch.softmax(left - far * _HIDDEN, dim=1) * hit
        weights = weight if weights is None else weights + weight
        left = left - hit * _AWAY
    assert weights is not None
    return weights


class Router(nn.Module):
    """One matrix: x [1, d, T, 1] -> logits [1, classes, T, 1]."""

    def __init__(self, weights: Weights, path: str) -> None:
        super().__init__()
        self.weight = unquantized(weights[f"{path}weight"])
        bias = weights.get(f"{path}bias")
        self.bias = None if bias is None else vector(bias)

    def forward(self, x: Tensor) -> Tensor:
        logits = multiply(self.weight, x)
        return logits if self.bias is None else add_channels(logits, self.bias)


class StatefulRouter(nn.Module):
    """ZAYA's router: an MLP on a hidden state, plus the scaled router state of the layer before.

    Source: transformers, models/zaya/modeling_zaya.py.
    """

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__()

        def layer(name: str, bias: bool = True) -> nn.Module:
            names = ("weight", "bias") if bias else ("weight",)
            return Router({part: weights[f"{path}{name}.{part}"] for part in names}, "")

        self.down_proj, self.fc1, self.fc2 = layer("down_proj"), layer("fc1"), layer("fc2")
        self.out_proj = layer("out_proj", bias=False)
        self.norm = RMSNorm(weights[f"{path}norm.weight"], g.rms_norm_eps)
        if kind.carries:
            self.states_scale = nn.Parameter(weights[f"{path}states_scale"].reshape(1, -1, 1, 1), requires_grad=False)
        self.carries = kind.carries

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the router's state [1, router_width, T, 1], given the state of the layer before."""
        state = self.down_proj(x)
        if self.carries:
            state = state + before * self.states_scale
        y = gelu_erf(self.fc1(self.norm(state)))
        return self.out_proj(gelu_erf(self.fc2(y))), state


class ExpertGroup(nn.Module):
    """Experts that share their projections: x [1, d, T, 1] and weights [1, group, T, 1] -> [1, d, T, 1]."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        assert g.experts is not None
        self.g, self.experts = g, g.experts
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, projection(weights[f"{path}{name}.weight"], weights.get(f"{path}{name}.bias")))
        if self.experts.group > 1:
            self.scale = nn.Parameter(weights[f"{path}scale"].reshape(1, -1, 1, 1), requires_grad=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        e = self.experts
        hidden = gated(self.gate_proj(x), self.up_proj(x), e, self.g.activation)  # [1, group * ffn, T, 1]
        if e.group == 1:
            hidden = hidden * weight
        else:
            hidden = hidden.reshape(1, e.group, e.ffn, -1) * weight.reshape(1, e.group, 1, -1)
            hidden = hidden.reshape(1, e.group * e.ffn, -1, 1) * self.scale
        out: Tensor = self.down_proj(hidden)
        return out


def gated(gate: Tensor, up: Tensor, experts: Experts, activation: str) -> Tensor:
    """Return activation(gate) * up, or the clamped form of gpt_oss."""
    if not experts.swiglu_alpha:
        return ACTIVATIONS[activation](gate) * up
    limit = experts.swiglu_limit
    gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
    sigmoid = sigmoid_by_tanh if activation == SILU_TANH else torch.sigmoid
    return (up + 1) * (gate * sigmoid(scale(gate, experts.swiglu_alpha)))


class ExpertChoice(nn.Module):
    """The choice of experts: x [1, d, T, 1] -> weights [1, experts, T, 1], and the router's state if it has one."""

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__()
        assert g.experts is not None
        self.options = g.experts
        if self.options.router == "mlp":
            self.router: nn.Module = StatefulRouter(g, kind, weights, f"{path}router.")
        else:
            self.router = Router(weights, f"{path}router.")
        choice = weights.get(f"{path}choice_bias")
        self.choice_bias = None if choice is None else vector(choice)

    def forward(self, x: Tensor, order: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        state = None
        if before is None:
            logits = self.router(x)
        else:
            logits, state = self.router(x, before)
        return route(logits, order, self.options, self.choice_bias), state


class ExpertSum(nn.Module):
    """Experts side by side, as `experts.J`, and the biases of their down projections, which take the same weights."""

    experts: nn.ModuleList
    down_bias: nn.Parameter | None
    group: int

    def hold(self, g: Graph, weights: Weights, path: str, count: int) -> None:
        """Make the modules of `count` experts."""
        assert g.experts is not None
        self.group = g.experts.group
        units = range(count // self.group)
        self.experts = nn.ModuleList([ExpertGroup(g, weights, f"{path}experts.{j}.") for j in units])
        bias = weights.get(f"{path}down_bias")
        self.down_bias = None if bias is None else unquantized(bias)

    def total(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sum of all experts, without biases: x [1, d, T, 1], weights [1, count, T, 1]."""
        out: Tensor | None = None
        for expert, share in zip(self.experts, one_by_one(weight, len(self.experts), self.group), strict=True):
            y = expert(x, share)
            out = y if out is None else out + y
        assert out is not None
        return out


class Mixture(ExpertChoice, ExpertSum):
    """All experts of a layer: x [1, d, T, 1] -> [1, d, T, 1], with the router's state if it has one."""

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__(g, kind, weights, path)
        self.hold(g, weights, path, self.options.count)

    def forward(self, x: Tensor, order: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        weight, state = super().forward(x, order, before)
        out = self.total(x, weight)
        if self.down_bias is not None:
            out = out + multiply(self.down_bias, weight)
        return out, state


class RoutedExperts(ExpertSum):
    """Some of a layer's experts as a separate program: the contract's part of kind "experts"."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        g = spec.graph
        self.g, self.count = g, spec.rows
        self.hold(g, weights, "", spec.rows)
        if g.residual_scales:
            self.branch_scale = nn.Parameter(weights["branch_scale"].reshape(1, -1, 1, 1), requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        out = self.total(x, weights)
        if self.down_bias is not None:  # sizes as numbers: coremltools can't read a constant's without states
            biases = torch.matmul(self.down_bias, weights.reshape(1, 1, self.count, -1))
            out = out + biases.reshape(1, self.g.hidden, -1, 1)
        out = scale(out, self.g.branch_scale)
        return out * self.branch_scale if self.g.residual_scales else out
