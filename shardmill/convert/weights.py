"""A part's weights, read from the checkpoint's byte ranges and turned into the constants of its program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardmill import plan
from shardmill.checkpoint.headers import TensorInfo
from shardmill.errors import CheckpointError
from shardmill.models.architecture import Source
from shardmill.models.contract import constants

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FP16_MAX = float(torch.finfo(torch.float16).max)


def read(tensor: plan.Tensor, source: Path) -> Tensor:
    """The bytes of a constant as they lie in the checkpoint, in their own dtype and shape.

    They are mapped, so nothing is copied until it is used.
    """
    return read_info(tensor.info, source)


def read_info(info: TensorInfo, source: Path) -> Tensor:
    """The same for any tensor of a checkpoint."""
    raw = np.memmap(source / info.file, dtype=np.uint8, mode="c", offset=info.start, shape=(info.end - info.start,))
    return torch.from_numpy(raw).view(DTYPES[info.dtype]).reshape(info.shape)


def turned(rows: Tensor, source: Source) -> Tensor:
    """A constant's rows, given those of the checkpoint's tensor in any float dtype; fp32 where they change."""
    if source.column is not None:
        rows = rows[..., source.column].reshape(len(rows), 1)
    if (source.add, source.times) == (0.0, 1.0):
        return rows
    return (rows.float() + source.add) * source.times


class PartWeights(Mapping[str, Tensor]):
    """A part's constants in fp32 by their paths.

    Each is read when it is asked for and not kept, so a part of any size takes the memory of one constant.
    """

    def __init__(self, part: plan.Part, source: Path) -> None:
        self.tensors = {tensor.path: tensor for tensor in part.tensors}
        self.shapes = constants(part.form) if part.kind == "encoder" else {}
        self.source = source

    def __getitem__(self, path: str) -> Tensor:
        """Raises CheckpointError for a weight that fp16, the dtype of every program, can't hold."""
        tensor = self.tensors[path]
        values = turned(read(tensor, self.source), tensor.source).float().reshape(tensor.shape)
        if float(values.abs().max()) > FP16_MAX:
            raise CheckpointError(f"{tensor.label}: holds values over {FP16_MAX:.0f}, which fp16 programs can't")
        missing = self.shapes.get(path, values.shape)[0] - len(values)  # rows of a classifier without a label
        return torch.cat([values, torch.zeros(missing, *values.shape[1:])]) if missing else values

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
