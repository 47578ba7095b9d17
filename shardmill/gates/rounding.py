"""Are a program's weights the checkpoint's? Rounded ones have to be near them, chosen ones just as they were chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardmill.convert.weights import PartWeights, block
from shardmill.forms.form import matrices
from shardmill.gates.heap import give_back
from shardmill.gates.measurement import Measurement
from shardmill.gates.stored import Stored
from shardmill.gates.weights import Chosen, PackageWeights

TOO_SMALL = ", of which rows are so small that fp16 has no scale for them; give it the form fp16 in a recipe"


def weights_kept(stored: PackageWeights, source: Path) -> Iterator[Measurement]:
    """How far the stored weights are from the checkpoint's, and where a quantiser chose codes, from those.

    Args:
        stored: the package's weights.
        source: the checkpoint's folder.
    """
    chosen = stored.chosen
    given = [path for path in stored.part.shapes if chosen and chosen.named(path)]
    yield Measurement("weight_steps", *weight_steps(stored, source, [p for p in stored.part.shapes if p not in given]))
    if chosen and given:
        yield Measurement("codes_differ", *codes_differ(stored, chosen, given))
        yield Measurement("code_steps", *weight_steps(stored, source, given))


def weight_steps(stored: PackageWeights, source: Path, paths: list[str]) -> tuple[float, str]:
    """Largest distance of stored weights from the original ones in quantisation steps, and the tensor's name.

    A tensor stored in fp16 counts in steps of fp16 (2^-10 of the value). NaN if any distance is.

    Args:
        stored: the package's weights.
        source: the checkpoint's folder.
        paths: which constants.
    """
    worst, where, weights = 0.0, "", PartWeights(stored.part, source)
    for path in paths:
        steps, lost = _steps(stored, weights, path, source)
        give_back()
        if math.isnan(steps) or steps > worst:
            worst, where = steps, weights.tensors[path][0].label + (TOO_SMALL if lost and steps > 1 else "")
        if math.isnan(worst):
            break
    return worst, where


def _steps(stored: PackageWeights, weights: PartWeights, path: str, source: Path) -> tuple[float, bool]:
    """The same of one constant, NaN included; and whether any of its channels has a scale of 0.

    It is gone when the next is read.
    """
    kept = stored.stored(path)
    blocks = _blocks(kept, weights, path, source)
    found = [float(rows.sub_(expected).abs_().div_(step).max()) for rows, expected, step in blocks]
    return float(np.max(found)), kept.scale is not None and not bool(kept.scale.all())  # np.max keeps NaN


def kept_db(stored: PackageWeights, source: Path) -> dict[str, float]:
    """How much of each matrix is kept: its signal over the noise of what is stored, in dB, by its path.

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
    """Rows of a constant as they are stored, those of the checkpoint, and the quantisation step between them."""
    tensors = weights.tensors[path]
    original = block(tensors[0], source) if len(tensors) == 1 else weights[path]
    original = original.reshape(kept.values.shape)
    first = 0
    for rows in kept.rows():
        expected = original[first : first + len(rows)].float()
        yield rows, expected, kept.steps(expected, first)
        first += len(rows)


def codes_differ(stored: PackageWeights, chosen: Chosen, paths: list[str]) -> tuple[int, str]:
    """How many stored codes and scales are others than a quantiser's, and the constant that has the most of them."""
    found = {path: _different(stored.stored(path), chosen.of(path)) for path in paths}
    worst = max(found, key=lambda path: found[path])
    return sum(found.values()), worst if found[worst] else ""


def _different(kept: Stored, theirs: Mapping[str, Tensor]) -> int:
    """The same of one constant. What has another form than it was to have differs in each of its numbers."""
    mine = {"codes" if kept.coded else "": kept.values, "scale": kept.scale, "lut": kept.tables}
    held = {name: values for name, values in mine.items() if values is not None}
    if held.keys() != theirs.keys():
        return kept.values.numel()
    return sum(int((theirs[name].reshape(v.shape) != v.to(theirs[name].dtype)).sum()) for name, v in held.items())
