"""Routing of a mixture of experts inside a program: which experts a token takes, and with which weights.

Exactly the k best are taken, as topk takes them, but without topk, gather, booleans or integers, which leave the Neural
Engine: with differences, clips, maxima and products only. Of equal scores the lower index wins. Scores and weights are
[1, experts, T, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmill.models.architecture import Experts
from shardmill.models.primitives import (
    add_channels,
    scale,
)

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
