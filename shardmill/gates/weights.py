"""Reads a package's weights by the checkpoint's names with coremltools, one tensor at a time.

Everything here that reads a package is coremltools' own, and nothing is the portable engine's, which is itself under
test. A tensor is in memory only while it is used, so a package of any size takes the memory of its largest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmill.convert.package import MODEL_FILE, load_spec
from shardmill.convert.weights import PartWeights, block
from shardmill.errors import GateError
from shardmill.gates.stored import ROWS, Stored
from shardmill.models.contract import stem
from shardmill.models.sources import put_back
from shardmill.plan import Part
from shardmill.plan import Tensor as Constant


class PackageWeights:
    """The constants of a package that hold a part's tensors."""

    def __init__(self, package: Path, part: Part, prefix: str = "model.") -> None:
        """Reads the program.

        Args:
            package: the .mlpackage.
            part: what it was made from.
            prefix: begins the checkpoint's names where transformers' begin with "model.".
        """
        (function,) = load_spec(package).mlProgram.functions.values()
        operations = function.block_specializations[function.opset].operations
        self.package, self.prefix = package, prefix
        self.ops = {op.outputs[0].name: op for op in operations if op.type.startswith("const")}
        self.part = part
        self.last: tuple[str, Tensor] | None = None  # experts that share a constant ask for it one after the other

    def __call__(self, name: str) -> Tensor:
        """A checkpoint's tensor in fp32, as the program's constants would have it.

        Args:
            name: transformers' name of it.

        Raises:
            GateError: if the package does not hold it.
        """
        made = self.made_of(name)
        if not made:
            raise GateError(f"{self.package.name} does not hold {name}")
        found = torch.zeros(made[0].source.shape or made[0].stored)
        self.fill(found, name)
        return found

    def made_of(self, name: str) -> list[Constant]:
        """The blocks that are made of a checkpoint's tensor, by transformers' name of it."""
        tensor = self.prefix + name.removeprefix("model.") if name.startswith("model.") else name
        return [held for held in self.part.tensors if held.source.tensor == tensor and held.source.magnitude != "only"]

    def fill(self, found: Tensor, name: str) -> None:
        """Writes what the package holds of a checkpoint's tensor to its place there: maybe only some experts."""
        for held in self.made_of(name):
            place = found if held.source.index is None else found[held.source.index]
            if held.rows and held.source.shape:  # the part's rows of a tensor that is read whole
                place = found[slice(*held.rows)]
            put_back(place, self.block(held), held.source, self.magnitude(held))

    def over(self, original: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """The checkpoint's tensors, `original`, with the package's values wherever it holds some."""

        def weights(name: str) -> Tensor:
            if not self.made_of(name):
                return original(name)
            found = original(name).float()  # mapped privately, if it is not a copy already
            self.fill(found, name)
            return found

        return weights

    def block(self, tensor: Constant) -> Tensor:
        """A block of a constant in fp32."""
        if self.last is None or self.last[0] != tensor.path:
            self.last = None  # one at a time
            self.last = tensor.path, self.values(tensor.path)
        values, (row, column) = self.last[1], tensor.at
        if len(tensor.shape) == 1:
            return values.flatten()[row : row + tensor.shape[0]]
        values = values.reshape(-1, values.shape[-1])
        return values[row : row + tensor.shape[0], column : column + tensor.shape[1]]

    def magnitude(self, tensor: Constant) -> float:
        """What a block was divided by, which another constant holds."""
        if not tensor.source.magnitude:
            return 1.0
        same = (tensor.source.tensor, tensor.source.index)
        held = next(
            one
            for one in self.part.tensors
            if one.source.magnitude == "only" and (one.source.tensor, one.source.index) == same
        )
        return float(self.block(held)[0])

    def values(self, path: str) -> Tensor:
        """A constant in fp32."""
        return self.stored(path).whole()

    def rows(self, path: str) -> Iterator[Tensor]:
        """The same, a block of rows at a time, each block over the one before it."""
        return self.stored(path).rows()

    def stored(self, path: str) -> Stored:
        """A constant as it is stored."""
        op = self.op(path)
        if op.type == "const":
            return Stored(self.read(op.attributes["val"]).squeeze())
        names = ("indices", "lut") if op.type == "constexpr_lut_to_dense" else ("data", "scale")
        values, beside = (self.read(op.inputs[key].arguments[0].value) for key in names)
        values = values.flatten(start_dim=1)
        if "lut" in names:
            return Stored(values, tables=beside.reshape(-1, beside.shape[-2]))
        return Stored(values, scale=beside.float().reshape(-1, 1))

    def read(self, value: Any) -> Tensor:
        """A value of the protobuf. Each gets its own reader, since a reader keeps all that it has read in memory."""
        from coremltools.converters.mil.frontend.milproto.load import TranscriptionContext, _load_value

        files = TranscriptionContext(str(self.package / MODEL_FILE.parent / "weights"))
        return torch.from_numpy(np.asarray(_load_value(files, value)))

    def op(self, path: str) -> Any:
        """The operation that holds a constant."""
        for candidate in (f"{stem(path)}_to_fp16{suffix}" for suffix in ("_quantized", "_palettized", "")):
            if candidate in self.ops:
                return self.ops[candidate]
        raise GateError(f"{self.package.name} does not hold {path}: no constant {stem(path)}")


def weight_steps(stored: PackageWeights, source: Path) -> tuple[float, str]:
    """Largest distance of stored weights from the original ones in quantisation steps, and the tensor's name.

    A tensor stored in fp16 counts in steps of fp16 (2^-10 of the value). NaN if any distance is.

    Args:
        stored: the package's weights.
        source: the checkpoint's folder.
    """
    worst, where, weights = 0.0, "", PartWeights(stored.part, source)
    for path in weights:
        tensors, kept = weights.tensors[path], stored.stored(path)
        original = block(tensors[0], source) if len(tensors) == 1 else weights[path]
        original = original.reshape(kept.values.shape)
        for i, rows in enumerate(kept.rows()):
            expected = original[i * ROWS : (i + 1) * ROWS].float()
            step = kept.steps(expected, i * ROWS)
            steps = float(rows.sub_(expected).abs_().div_(step).max())
            if math.isnan(steps):
                return steps, tensors[0].label
            if steps > worst:
                worst, where = steps, tensors[0].label
    return worst, where
