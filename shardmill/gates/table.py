"""Compares every row of the host's embedding table with the checkpoint; the other gates' text uses only some hundred.

Both files are read a block of rows at a time, so that a table of gigabytes takes the memory of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from shardmill.checkpoint.headers import TensorInfo, read_header
from shardmill.convert.weights import DTYPES, beside
from shardmill.errors import GateError
from shardmill.forms.form import form
from shardmill.gates.measurement import Measurement
from shardmill.gates.rounding import Worst, distances, further
from shardmill.gates.stored import Stored, rows_at_once
from shardmill.models.sources import turned
from shardmill.plan import Constant, Part


def table_parity(embedding: Part, source: Path, table: Path) -> list[Measurement]:
    """Return how far stored rows and their scales are from the checkpoint's, and the token of the worst row.

    Args:
        embedding: the embedding part.
        source: the checkpoint's folder.
        table: embedding.safetensors, whose rows include every multiplier of the model.

    Raises:
        GateError: if the table's shape differs from the checkpoint's.
    """
    worst: dict[str, Worst] = dict.fromkeys(("weight_steps", "subnormal_steps", "scale_steps"), (0.0, ""))
    for tensor in embedding.tensors:
        for first, found in _distances(tensor, source, table):
            for name, steps in found.items():
                where = f"{tensor.label}, token {first + int(steps.argmax())}"  # NaN counts as the largest
                worst[name] = further(worst[name], steps, where)
    return [
        Measurement("weight_steps", *worst["weight_steps"]),
        Measurement("subnormal_steps", *worst["subnormal_steps"]),
        Measurement("scale_steps", *worst["scale_steps"]),
    ]


def _distances(original: Constant, source: Path, table: Path) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield the first row of each block of one table, and the distances measured in the block's rows.

    Raises:
        GateError: if the table's shape differs from the checkpoint's.
    """
    held = {tensor.name: tensor for tensor in read_header(table.parent, table.name)}
    stored = held.get(original.path)
    if stored is None or stored.shape != original.shape:
        found = "none" if stored is None else list(stored.shape)
        raise GateError(f"{table.name}: {original.label} is {list(original.shape)}, the table is {found}; build again")
    first, vectors = 0, beside(original, source)
    scale = _scale(held.get(f"{original.path}.scale"), table.parent)
    pairs = zip(_blocks(stored, table.parent), _blocks(original.info, source), strict=True)
    for rows, plain in pairs:
        kept = Stored(rows, None if scale is None else scale[first : first + len(rows)])
        expected = turned(plain, original.source, vectors)
        steps = kept.whole().sub_(expected).abs_().div_(kept.steps(expected, 0)).amax(1)  # [rows], NaN if a row has one
        of_rows = None if kept.scale is None else kept.scale[:, 0]
        yield first, distances(steps, of_rows, expected, form("int8").levels)
        first += len(rows)


def _scale(info: TensorInfo | None, folder: Path) -> torch.Tensor | None:
    """Return the scales [rows, 1] of a table in int8, in fp32."""
    if info is None:
        return None
    (rows,) = info.shape
    held = np.fromfile(folder / info.file, np.float16, rows, offset=info.start)
    return torch.from_numpy(held.astype(np.float32))[:, None]


def _blocks(tensor: TensorInfo, folder: Path) -> Iterator[torch.Tensor]:
    """Yield a matrix in fp32, a block of rows at a time."""
    rows, columns = tensor.shape
    dtype = torch.int8 if tensor.dtype == "I8" else DTYPES[tensor.dtype]
    at_once = rows_at_once(columns)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        size, offset = count * columns * dtype.itemsize, tensor.start + first * columns * dtype.itemsize
        raw = np.fromfile(folder / tensor.file, np.uint8, size, offset=offset)
        yield torch.from_numpy(raw).view(dtype).view(count, columns).float()
