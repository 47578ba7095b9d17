"""Reads a package's weights by the checkpoint's names with coremltools, one tensor at a time.

Everything here that reads a package is coremltools' own, and nothing is the portable engine's, which is itself under
test. A tensor is in memory only while it is used, so a package of any size takes the memory of its largest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmill.convert.package import MODEL_FILE, load_spec
from shardmill.errors import GateError
from shardmill.gates.reference import Weights
from shardmill.plan import Part

FP16_STEP = 2**-24  # between neighbouring fp16 numbers near 0
ROWS = 1024  # expanded to fp32 at a time: 34 MB of a matrix with 8192 columns


class PackageWeights:
    """The constants of a package that hold a part's tensors."""

    def __init__(self, package: Path, part: Part) -> None:
        (function,) = load_spec(package).mlProgram.functions.values()
        operations = function.block_specializations[function.opset].operations
        self.package = package
        self.ops = {op.outputs[0].name: op for op in operations if op.type.startswith("const")}
        self.names = constant_names(part)

    def __call__(self, name: str) -> Tensor:
        """A tensor in fp32 with the checkpoint's shape. Raises GateError if the package does not hold it."""
        values, scale = self.stored(name)
        return values.float() if scale is None else values.float().mul_(scale)

    def rows(self, name: str) -> Iterator[Tensor]:
        """The same tensor, ROWS rows at a time; each block overwrites the one before it."""
        return expanded(*self.stored(name))

    def stored(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A tensor as it is stored, and for int8 the quantisation step of each output channel [out, 1]."""
        op = self.op(name)
        if op.type == "const":
            return self.read(op.attributes["val"]).squeeze(), None
        values, scale = (self.read(op.inputs[key].arguments[0].value) for key in ("data", "scale"))
        return values.flatten(start_dim=1), scale.float().reshape(-1, 1)

    def read(self, value: Any) -> Tensor:
        """A value of the protobuf. Each gets its own reader, since a reader keeps all that it has read in memory."""
        from coremltools.converters.mil.frontend.milproto.load import TranscriptionContext, _load_value

        files = TranscriptionContext(str(self.package / MODEL_FILE.parent / "weights"))
        return torch.from_numpy(np.asarray(_load_value(files, value)))

    def op(self, name: str) -> Any:
        """The constant that holds a tensor."""
        stem = self.names[name]
        for candidate in (f"{stem}_to_fp16_quantized", f"{stem}_to_fp16"):
            if candidate in self.ops:
                return self.ops[candidate]
        raise GateError(f"{self.package.name} does not hold {name}: no constant {stem}")


def expanded(values: Tensor, scale: Tensor | None) -> Iterator[Tensor]:
    """Stored values in fp32, ROWS rows at a time; the product with the scale is not rounded to fp16 again.

    Each block overwrites the one before it: allocating a new one each time would fragment the heap.
    """
    scratch = torch.empty(values[:ROWS].shape)
    for first in range(0, len(values), ROWS):
        kept = values[first : first + ROWS]
        rows = scratch[: len(kept)].copy_(kept)
        yield rows if scale is None else rows.mul_(scale[first : first + ROWS])


def constant_names(part: Part) -> Mapping[str, str]:
    """Maps a checkpoint name to the stem of its constant's name, which coremltools makes from the module's path."""
    names = [tensor.name.split("[")[0] for tensor in part.tensors]
    if part.kind == "head":
        return dict(zip(names, ("norm_weight", "lm_head_weight"), strict=True))
    return {name: name.removeprefix("model.").replace(".", "_") for name in names}


def weight_steps(stored: PackageWeights, original: Weights) -> tuple[float, str]:
    """The largest distance of a stored weight from the original one in quantisation steps, and its tensor's name.

    The step of a tensor stored in fp16 is that of fp16, 2^-10 of the value. No step is less than the smallest of fp16,
    for a channel of zeros has a scale of 0. The result is NaN if any distance is.
    """
    worst, where = 0.0, ""
    for name in stored.names:
        values, (kept, scale) = original(name), stored.stored(name)
        for i, rows in enumerate(expanded(kept, scale)):
            expected = values[i * ROWS : (i + 1) * ROWS].float()
            step = fp16_step(expected) if scale is None else scale[i * ROWS : (i + 1) * ROWS].clamp(min=FP16_STEP)
            steps = float(rows.sub_(expected).abs_().div_(step).max())
            if math.isnan(steps):
                return steps, name
            if steps > worst:
                worst, where = steps, name
    return worst, where


def fp16_step(values: Tensor) -> Tensor:
    """An upper bound of the distance between neighbouring fp16 numbers at each value."""
    return (values.abs() * 2**-10).clamp(min=FP16_STEP)
