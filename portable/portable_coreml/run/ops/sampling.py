"""Random numbers, activation quantisation, box selection and classification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from portable_coreml.run.ops.registry import Ints, kernel

_RANGES = {"int8": (-128, 127, torch.int8), "uint8": (0, 255, torch.uint8)}


def _generator(seed: int) -> torch.Generator | None:
    return torch.Generator().manual_seed(seed) if seed >= 0 else None


@kernel("random_uniform", impure=True, grows=True)
def random_uniform(shape: Ints, low: float = 0.0, high: float = 1.0, seed: int = -1) -> Tensor:
    return low + (high - low) * torch.rand(list(shape), generator=_generator(seed))


@kernel("random_normal", impure=True, grows=True)
def random_normal(shape: Ints, mean: float = 0.0, stddev: float = 1.0, seed: int = -1) -> Tensor:
    return mean + stddev * torch.randn(list(shape), generator=_generator(seed))


@kernel("random_bernoulli", impure=True, grows=True)
def random_bernoulli(shape: Ints, prob: float = 0.5, seed: int = -1) -> Tensor:
    return (torch.rand(list(shape), generator=_generator(seed)) < prob).to(torch.float32)


@kernel("random_categorical", impure=True, grows=True)
def random_categorical(x: Tensor, mode: str = "logits", size: int = 1, seed: int = -1) -> Tensor:
    weights = x if mode == "probs" else torch.softmax(x, -1)
    flat = torch.multinomial(weights.reshape(-1, x.shape[-1]), size, replacement=True, generator=_generator(seed))
    return flat.reshape(*x.shape[:-1], size).to(torch.float32)


def _along(parameter: Tensor, x: Tensor, axis: int | None) -> Tensor:
    if parameter.dim() == 0:
        return parameter
    wanted = int(axis or 0) % x.dim()
    return parameter.reshape([-1 if d == wanted else 1 for d in range(x.dim())])


@kernel("quantize")
def quantize(
    input: Tensor, scale: Tensor, output_dtype: str, zero_point: Tensor | None = None, axis: int | None = None
) -> Tensor:
    low, high, kind = _RANGES[output_dtype]
    values = torch.round(input / _along(scale, input, axis))
    if zero_point is not None:
        values = values + _along(zero_point.to(torch.float32), input, axis)
    return values.clamp(low, high).to(kind)


@kernel("dequantize")
def dequantize(input: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int | None = None) -> Tensor:
    values = input.to(torch.float32)
    if zero_point is not None:
        values = values - _along(zero_point.to(torch.float32), input, axis)
    return values * _along(scale, input, axis)


@kernel("non_maximum_suppression")
def non_maximum_suppression(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    score_threshold: float | None = None,
    per_class_suppression: bool = False,
) -> tuple[Tensor, ...]:
    """iOS15: boxes [n, B, 4], a score threshold and a fourth result, the count; iOS17: boxes [n, 4, B], neither."""
    last = score_threshold is None
    if last:
        boxes, scores = boxes.transpose(1, 2), scores.transpose(1, 2)
    picked = [
        _select(b, s, iou_threshold, score_threshold, max_boxes, per_class_suppression)
        for b, s in zip(boxes, scores, strict=True)
    ]
    count = torch.tensor([len(p) for p in picked], dtype=torch.int32)
    out_boxes = torch.zeros(len(picked), max_boxes, 4)
    out_scores = torch.zeros(len(picked), max_boxes, scores.shape[2])
    indices = torch.full((len(picked), max_boxes), -1, dtype=torch.int32)
    for i, rows in enumerate(picked):
        out_boxes[i, : len(rows)], out_scores[i, : len(rows)] = boxes[i, rows], scores[i, rows]
        indices[i, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
    if last:
        return out_boxes.transpose(1, 2), out_scores.transpose(1, 2), indices
    return out_boxes, out_scores, indices, count


def _select(boxes: Tensor, scores: Tensor, iou: float, floor: float | None, limit: int, per_class: bool) -> list[int]:
    best, owner = scores.max(1)
    order = torch.argsort(best, descending=True, stable=True).tolist()
    kept: list[int] = []
    for i in order:
        if len(kept) == limit or (floor is not None and float(best[i]) < floor):
            break
        rivals = [j for j in kept if not per_class or owner[i] == owner[j]]
        if all(_overlap(boxes[i], boxes[j]) <= iou for j in rivals):
            kept.append(i)
    return kept


def _overlap(a: Tensor, b: Tensor) -> float:
    """Intersection over union of two boxes (x, y, width, height), (x, y) the centre."""
    low = torch.maximum(a[:2] - a[2:] / 2, b[:2] - b[2:] / 2)
    high = torch.minimum(a[:2] + a[2:] / 2, b[:2] + b[2:] / 2)
    shared = float((high - low).clamp(min=0).prod())
    union = float(a[2:].prod() + b[2:].prod()) - shared
    return shared / union if union else 0.0


@kernel("classify")
def classify(probabilities: Tensor, classes: Ints) -> tuple[Any, Any]:
    """The likeliest class and {class: probability}: the only results that are not tensors."""
    flat = probabilities.reshape(-1).tolist()
    table = dict(zip(classes, flat, strict=True))
    return classes[int(probabilities.reshape(-1).argmax())], table
