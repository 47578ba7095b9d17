"""A part's weights, read from the checkpoint's byte ranges."""

from __future__ import annotations

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


def read_all(part: plan.Part, source: Path) -> dict[str, Tensor]:
    """All tensors of a part in fp32, by name; rows of a tensor go by the tensor's name.

    Raises CheckpointError for a weight that fp16, the dtype of every program, can't hold.
    """
    weights = {}
    for tensor in part.tensors:
        values = read(tensor, source).float()
        if float(values.abs().max()) > FP16_MAX:
            raise CheckpointError(f"{tensor.name}: holds values over {FP16_MAX:.0f}, which fp16 programs can't")
        weights[tensor.name.split("[")[0]] = values
    return weights
