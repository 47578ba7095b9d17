"""A part's weights, read from the checkpoint's byte ranges and turned into the constants of its program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardmill.checkpoint.headers import TensorInfo
from shardmill.errors import CheckpointError
from shardmill.models.sources import assembled, turned
from shardmill.plan import Constant, Part

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FP16_MAX = float(torch.finfo(torch.float16).max)


def read_tensor(tensor: Constant, source: Path) -> Tensor:
    """Return the bytes of a constant as they lie in the checkpoint, in their own dtype and shape.

    The bytes are memory-mapped, so nothing is copied until it is used.
    """
    return read_info(tensor.info, source)


def read_info(info: TensorInfo, source: Path) -> Tensor:
    """Return the bytes of any tensor of a checkpoint, as `read_tensor` does for a constant."""
    raw = np.memmap(source / info.file, dtype=np.uint8, mode="c", offset=info.start, shape=(info.end - info.start,))
    return torch.from_numpy(raw).view(DTYPES[info.dtype]).reshape(info.shape)


def block(tensor: Constant, source: Path) -> Tensor:
    """Return a whole block of a constant, in the checkpoint's dtype or fp32."""
    return turned(read_tensor(tensor, source), tensor.source, beside(tensor, source))


def beside(tensor: Constant, source: Path) -> list[Tensor]:
    """Return the vectors that the block's source names."""
    return [read_tensor(vector, source) for vector in tensor.beside]


class PartWeights(Mapping[str, Tensor]):
    """A part's constants in fp32 by their paths.

    Each constant is read on access and not kept, so a part of any size takes the memory of one constant.
    """

    def __init__(self, part: Part, source: Path) -> None:
        self.shapes, self.source = part.shapes, source
        self.tensors: dict[str, list[Constant]] = {path: [] for path in self.shapes}
        for tensor in part.tensors:
            self.tensors[tensor.path].append(tensor)

    def __getitem__(self, path: str) -> Tensor:
        """Return a constant. Raises CheckpointError for a weight that fp16, the dtype of every program, can't hold."""
        blocks = [block(tensor, self.source).float() for tensor in self.tensors[path]]
        for tensor, values in zip(self.tensors[path], blocks, strict=True):
            if not float(values.abs().max()) <= FP16_MAX:  # NaN fails this test, too
                raise CheckpointError(f"{tensor.label}: holds values over {FP16_MAX:.0f}, which fp16 programs can't")
        return assembled(blocks, self.shapes[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
