"""Compares a program's weights with the checkpoint's: rounded weights must be near, a quantiser's codes identical."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardmill.convert.weights import PartWeights, block
from shardmill.forms.form import FP16, form, matrices
from shardmill.gates.heap import give_back
from shardmill.gates.measurement import Measurement
from shardmill.gates.stored import Stored, fp16_step
from shardmill.gates.weights import Chosen, PackageWeights

TOO_SMALL = ", some of whose rows are too small for a scale in fp16; give the matrix the form fp16 in a recipe"
FP16_NORMAL = 2.0**-14  # the smallest number that fp16 represents in full precision
Worst = tuple[float, str]  # the largest value of some tensors, NaN if there is one, and the label of its tensor


def weights_kept(stored: PackageWeights, source: Path, forms: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield how far the stored weights are from the checkpoint's weights and from the codes that a quantiser chose.

    Args:
        stored: the package's weights.
        source: the checkpoint's folder.
        forms: the form that a recipe gives to each matrix, by its path.
    """
    chosen = stored.chosen
    given = [path for path in stored.part.shapes if chosen and chosen.named(path)]
    yield from _rounded(stored, source, [p for p in stored.part.shapes if p not in given], forms)
    if chosen and given:
        yield Measurement("codes_differ", *codes_differ(stored, chosen, given))
        yield Measurement("code_steps", *weight_steps(stored, source, given))


def weight_steps(stored: PackageWeights, source: Path, paths: list[str]) -> Worst:
    """Return the largest distance of stored weights from the original ones, in quantisation steps.

    The step of a tensor in fp16 is fp16's (2^-10 of the value); the step of a palette is the gap between its entries.

    Args:
        stored: the package's weights.
        source: the checkpoint's folder.
        paths: the constants to compare.
    """
    worst, weights = (0.0, ""), PartWeights(stored.part, source)
    for path in paths:
        for rows, expected, step in _blocks(stored.stored(path), weights, path, source):
            worst = further(worst, _steps(rows, expected, step), weights.tensors[path][0].label)
        give_back()
    return worst


def _rounded(stored: PackageWeights, source: Path, paths: list[str], forms: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield the rounding errors of constants: of codes, of codes with subnormal scales, and of scales."""
    worst: dict[str, Worst] = dict.fromkeys(("weight_steps", "subnormal_steps", "scale_steps"), (0.0, ""))
    weights = PartWeights(stored.part, source)
    for path in paths:
        kept, label, wanted = stored.stored(path), weights.tensors[path][0].label, form(forms.get(path, FP16))
        if not kept.has_form(wanted):
            other = torch.tensor([math.inf])
            worst["scale_steps"] = further(worst["scale_steps"], other, f"{label}, which is not stored in its form")
        first = 0
        for rows, expected, step in _blocks(kept, weights, path, source):
            scale = None if kept.scale is None else kept.scale[first : first + len(rows), 0]
            for name, steps in distances(_steps(rows, expected, step), scale, expected, wanted.levels).items():
                worst[name] = further(worst[name], steps, label)
            first += len(rows)
        give_back()
        value, where = worst["subnormal_steps"]
        if where == label and value > 1 and kept.scale is not None and not bool(kept.scale.all()):
            worst["subnormal_steps"] = value, label + TOO_SMALL
    yield Measurement("weight_steps", *worst["weight_steps"])
    yield Measurement("subnormal_steps", *worst["subnormal_steps"])
    yield Measurement("scale_steps", *worst["scale_steps"])


def distances(steps: Tensor, scale: Tensor | None, expected: Tensor, levels: int) -> dict[str, Tensor]:
    """Return the distances measured in a block of rows, by the measurement's name, each [rows].

    Args:
        steps: the largest distance of each row's weights, in quantisation steps, [rows].
        scale: the stored scales, [rows]; None for a block without scales.
        expected: the checkpoint's rows.
        levels: the largest code.
    """
    if scale is None:
        return {"weight_steps": steps}
    small = scale < FP16_NORMAL
    largest = torch.linalg.vector_norm(expected.reshape(len(expected), -1), ord=math.inf, dim=1) / levels
    return {
        "weight_steps": steps.masked_fill(small, 0),
        "subnormal_steps": steps.masked_fill(~small, 0),
        "scale_steps": (scale - largest).abs() / fp16_step(largest),
    }


def further(worst: Worst, found: Tensor, label: str) -> Worst:
    """Return the larger of a value and the largest of a tensor, with its label; NaN is larger than any number."""
    value = float(found.max())  # keeps NaN
    if math.isnan(worst[0]):
        return worst
    return (value, label) if math.isnan(value) or value > worst[0] else worst


def _steps(rows: Tensor, expected: Tensor, step: Tensor) -> Tensor:
    """Return each row's largest distance in steps, [rows], NaN if a row has one. The stored rows are overwritten."""
    return rows.sub_(expected).abs_().div_(step).reshape(len(rows), -1).amax(1)


def kept_db(stored: PackageWeights, source: Path) -> dict[str, float]:
    """Return the signal-to-noise ratio of each stored matrix in dB, by its path.

    Args:
        stored: the package's weights.
        source: the checkpoint's folder.
    """
    weights, found = PartWeights(stored.part, source), {}
    for path in matrices(stored.part.shapes):
        signal = noise = 0.0
        for rows, expected, _ in _blocks(stored.stored(path), weights, path, source):
            signal += float(expected.square().sum(dtype=torch.float64))
            noise += float(rows.sub_(expected).square_().sum(dtype=torch.float64))
        found[path] = 10 * math.log10(signal / noise) if signal and noise else math.inf
    return found


def _blocks(kept: Stored, weights: PartWeights, path: str, source: Path) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield stored rows of a constant, the checkpoint's rows, and the quantisation step between them."""
    tensors = weights.tensors[path]
    original = block(tensors[0], source) if len(tensors) == 1 else weights[path]
    original = original.reshape(kept.values.shape)
    first = 0
    for rows in kept.rows():
        expected = original[first : first + len(rows)].float()
        yield rows, expected, kept.steps(expected, first)
        first += len(rows)


def codes_differ(stored: PackageWeights, chosen: Chosen, paths: list[str]) -> tuple[int, str]:
    """Return how many stored codes and scales differ from a quantiser's, and the constant with the most differences."""
    found = {path: _different(stored.stored(path), chosen.of(path)) for path in paths}
    worst = max(found, key=lambda path: found[path])
    return sum(found.values()), worst if found[worst] else ""


def _different(kept: Stored, theirs: Mapping[str, Tensor]) -> int:
    """Return the number of differences in one constant. If its form is wrong, all its numbers count as different."""
    mine = {"codes" if kept.coded else "": kept.values, "scale": kept.scale, "lut": kept.tables}
    held = {name: values for name, values in mine.items() if values is not None}
    if held.keys() != theirs.keys():
        return kept.values.numel()
    return sum(int((theirs[name].reshape(v.shape) != v.to(theirs[name].dtype)).sum()) for name, v in held.items())
