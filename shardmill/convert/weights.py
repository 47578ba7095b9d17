"""A part's weights, read from the checkpoint's byte ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardmill import plan
from shardmill.errors import CheckpointError

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FP16_MAX = float(torch.finfo(torch.float16).max)


def read(tensor: plan.Tensor, source: Path) -> Tensor:
    """A tensor as it lies in the checkpoint, in its own dtype; mapped, so nothing is copied until it is used."""
    size = tensor.end - tensor.start
    raw = np.memmap(source / tensor.file, dtype=np.uint8, mode="c", offset=tensor.start, shape=(size,))
    return torch.from_numpy(raw).view(DTYPES[tensor.dtype]).reshape(tensor.shape)


class PartWeights(Mapping[str, Tensor]):
    """A part's tensors in fp32 by the checkpoint's names, rows of a tensor under the tensor's name.

    Each is read when it is asked for and not kept, so a part of any size takes the memory of one tensor.
    """

    def __init__(self, part: plan.Part, source: Path) -> None:
        self.tensors = {tensor.name.split("[")[0]: tensor for tensor in part.tensors}
        self.source = source

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError for a weight that fp16, the dtype of every program, can't hold."""
        values = read(self.tensors[name], self.source).float()
        if float(values.abs().max()) > FP16_MAX:
            raise CheckpointError(f"{name}: holds values over {FP16_MAX:.0f}, which fp16 programs can't")
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
