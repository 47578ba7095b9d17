"""Compares a program's weights with the checkpoint's: rounded weights must be near, a quantiser's codes identical."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmill.checkpoint.headers import TensorInfo, read_header
from shardmill.convert.weights import DTYPES, PartWeights, beside, block
from shardmill.errors import GateError
from shardmill.forms.form import FP16, form, matrices
from shardmill.gates.measurement import Measurement
from shardmill.gates.reference import return_heap
from shardmill.gates.stored import Stored, fp16_step, rows_at_once
from shardmill.gates.thresholds import COST
from shardmill.gates.weights import Chosen, PackageWeights
from shardmill.models.sources import turned
from shardmill.plan import Constant, Part

TOO_SMALL = ", some of whose rows are too small for a scale in fp16; give the matrix the form fp16 in a recipe"
FP16_NORMAL = 2.0**-14  # the smallest number that fp16 represents in full precision
ROUNDING = ("weight_steps", "subnormal_steps", "scale_steps")  # measurements of rounded weights
Worst = tuple[float, str]  # the largest value of some tensors, NaN if there is one, and the label of its tensor


def weights_kept(stored: PackageWeights, source: Path, forms: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield how far the stored weights are from the checkpoint's weights and from the codes that a quantiser chose.

    Args:
        stored: the package's weights.
        source: the checkpoint's folder.
        forms: the form that a recipe gives to each matrix, by its path.
    """
    chosen = stored.chosen
    quantised = [path for path in stored.part.shapes if chosen and chosen.named(path)]
    yield from _rounded(stored, source, [p for p in stored.part.shapes if p not in quantised], forms)
    if chosen and quantised:
        yield Measurement("codes_differ", *codes_differ(stored, chosen, quantised))
        yield Measurement("code_steps", *weight_steps(stored, source, quantised))


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
        return_heap()
    return worst


def _rounded(stored: PackageWeights, source: Path, paths: list[str], forms: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield the rounding errors of constants: of codes, of codes with subnormal scales, and of scales."""
    worst: dict[str, Worst] = dict.fromkeys(ROUNDING, (0.0, ""))
    weights = PartWeights(stored.part, source)
    for path in paths:
        constant, label, wanted = stored.stored(path), weights.tensors[path][0].label, form(forms.get(path, FP16))
        if not constant.has_form(wanted):
            other = torch.tensor([math.inf])
            worst["scale_steps"] = further(worst["scale_steps"], other, f"{label}, which is not stored in its form")
        first = 0
        for rows, expected, step in _blocks(constant, weights, path, source):
            scale = None if constant.scale is None else constant.scale[first : first + len(rows), 0]
            for name, steps in distances(_steps(rows, expected, step), scale, expected, wanted.levels).items():
                worst[name] = further(worst[name], steps, label)
            first += len(rows)
        return_heap()
        value, where = worst["subnormal_steps"]
        if where == label and value > 1 and constant.scale is not None and not bool(constant.scale.all()):
            worst["subnormal_steps"] = value, label + TOO_SMALL
    yield from (Measurement(name, *largest) for name, largest in worst.items())


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


def further(worst: Worst, steps: Tensor, label: str) -> Worst:
    """Return the larger of a value and the largest of a tensor, with its label; NaN is larger than any number."""
    value = float(steps.max())  # keeps NaN
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
    weights, ratios = PartWeights(stored.part, source), {}
    for path in matrices(stored.part.shapes):
        signal = noise = 0.0
        for rows, expected, _ in _blocks(stored.stored(path), weights, path, source):
            signal += float(expected.square().sum(dtype=torch.float64))
            noise += float(rows.sub_(expected).square_().sum(dtype=torch.float64))
        ratios[path] = 10 * math.log10(signal / noise) if signal and noise else math.inf
    return ratios


def _blocks(constant: Stored, weights: PartWeights, path: str, source: Path) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield stored rows of a constant, the checkpoint's rows, and the quantisation step between them."""
    tensors = weights.tensors[path]
    original = block(tensors[0], source) if len(tensors) == 1 else weights[path]
    original = original.reshape(constant.values.shape)
    first = 0
    for rows in constant.rows():
        expected = original[first : first + len(rows)].float()
        yield rows, expected, constant.steps(expected, first)
        first += len(rows)


def codes_differ(stored: PackageWeights, chosen: Chosen, paths: list[str]) -> tuple[int, str]:
    """Return how many stored codes and scales differ from a quantiser's, and the constant with the most differences."""
    differences = {path: _different(stored.stored(path), chosen.of(path)) for path in paths}
    worst = max(differences, key=lambda path: differences[path])
    return sum(differences.values()), worst if differences[worst] else ""


def _different(constant: Stored, theirs: Mapping[str, Tensor]) -> int:
    """Return the number of differences in one constant. If its form is wrong, all its numbers count as different."""
    mine = {"codes" if constant.coded else "": constant.values, "scale": constant.scale, "lut": constant.tables}
    present = {name: values for name, values in mine.items() if values is not None}
    if present.keys() != theirs.keys():
        return constant.values.numel()
    return sum(int((theirs[name].reshape(v.shape) != v.to(theirs[name].dtype)).sum()) for name, v in present.items())


def table_parity(embedding: Part, source: Path, table: Path) -> list[Measurement]:
    """Return how far stored rows and their scales are from the checkpoint's, and the token of the worst row.

    Args:
        embedding: the embedding part.
        source: the checkpoint's folder.
        table: embedding.safetensors, whose rows include every multiplier of the model.

    Raises:
        GateError: if the table's shape differs from the checkpoint's.
    """
    worst: dict[str, Worst] = dict.fromkeys(ROUNDING, (0.0, ""))
    for tensor in embedding.tensors:
        for first, measured in _distances(tensor, source, table):
            for name, steps in measured.items():
                where = f"{tensor.label}, token {first + int(steps.argmax())}"  # NaN counts as the largest
                worst[name] = further(worst[name], steps, where)
    return [Measurement(name, *largest) for name, largest in worst.items()]


def _distances(original: Constant, source: Path, table: Path) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield the first row of each block of one table, and the distances measured in the block's rows.

    Raises:
        GateError: if the table's shape differs from the checkpoint's.
    """
    tensors = {tensor.name: tensor for tensor in read_header(table.parent, table.name)}
    stored = tensors.get(original.path)
    if stored is None or stored.shape != original.shape:
        shape = "none" if stored is None else list(stored.shape)
        raise GateError(f"{table.name}: {original.label} is {list(original.shape)}, the table is {shape}; build again")
    first, vectors = 0, beside(original, source)
    scale = _scale(tensors.get(f"{original.path}.scale"), table.parent)
    pairs = zip(_decoded_blocks(stored, table.parent), _decoded_blocks(original.info, source), strict=True)
    for rows, plain in pairs:
        piece = Stored(rows, None if scale is None else scale[first : first + len(rows)])
        expected = turned(plain, original.source, vectors)
        steps = _steps(piece.whole(), expected, piece.steps(expected, 0))
        of_rows = None if piece.scale is None else piece.scale[:, 0]
        yield first, distances(steps, of_rows, expected, form("int8").levels)
        first += len(rows)


def _scale(info: TensorInfo | None, folder: Path) -> torch.Tensor | None:
    """Return the scales [rows, 1] of a table in int8, in fp32."""
    if info is None:
        return None
    (rows,) = info.shape
    scales = np.fromfile(folder / info.file, np.float16, rows, offset=info.start)
    return torch.from_numpy(scales.astype(np.float32))[:, None]


def _decoded_blocks(tensor: TensorInfo, folder: Path) -> Iterator[torch.Tensor]:
    """Yield a matrix in fp32, a block of rows at a time."""
    rows, columns = tensor.shape
    dtype = torch.int8 if tensor.dtype == "I8" else DTYPES[tensor.dtype]
    at_once = rows_at_once(columns)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        size, offset = count * columns * dtype.itemsize, tensor.start + first * columns * dtype.itemsize
        raw = np.fromfile(folder / tensor.file, np.uint8, size, offset=offset)
        yield torch.from_numpy(raw).view(dtype).view(count, columns).float()


def name_worst_matrix(rows: Iterable[Mapping[str, Any]], worst: Callable[[], str]) -> list[dict[str, Any]]:
    """Return a verdict's rows; the first row that missed a limit of question 3 also names the worst matrix.

    Args:
        rows: the result of `measurement.compare`.
        worst: returns a text that names the worst matrix; called only if a row missed a limit.
    """
    verdict = [dict(row) for row in rows]
    missed = next((row for row in verdict if row["question"] == COST and not row["passed"]), None)
    if missed:
        missed["detail"] = "; ".join(filter(None, [missed["detail"], worst()]))
    return verdict


def furthest(all_stored: Iterable[PackageWeights], source: Path) -> str:
    """Return a text that names the matrix with the lowest signal-to-noise ratio, or '' if no matrix lost anything.

    Args:
        all_stored: the weights of one or more programs.
        source: the checkpoint's folder.
    """
    ratios = [(db, one.part.in_model(path)) for one in all_stored for path, db in kept_db(one, source).items()]
    least, path = min(ratios, default=(math.inf, ""))
    return f"{path} is stored furthest from the checkpoint's, {least:.1f} dB" if least < math.inf else ""
