"""Reads a package's weights with coremltools, one tensor at a time.

Everything here that reads a package is coremltools' code. The portable engine's reader is not used, because the
portable engine is itself under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from shardmill.convert.package import MODEL_FILE, load_spec
from shardmill.errors import GateError
from shardmill.forms.form import FP16
from shardmill.gates.stored import Stored, StoredWeights
from shardmill.models.part_kinds import stem
from shardmill.plan import Part


@dataclass(frozen=True)
class Chosen:
    """A quantiser's results.

    Attributes:
        file: the file with codes, scales and tables, as convert/codes.py describes it.
        forms: the forms of the part's matrices, by their paths.
    """

    file: Path
    forms: Mapping[str, str]

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the names of the file's tensors."""
        with safe_open(self.file, "pt") as tensors:
            return frozenset(tensors.keys())

    def named(self, path: str) -> dict[str, str]:
        """Return the names of a constant's tensors by role: codes, scale or lut; "" for values that are not codes."""
        names = {what: f"{path}.{self.forms.get(path, FP16)}.{what}" for what in ("codes", "scale", "lut")} | {"": path}
        return {what: name for what, name in names.items() if name in self.names}

    def of(self, path: str) -> dict[str, Tensor]:
        """Return a constant's tensors by their role, as in `named`."""
        with safe_open(self.file, "pt") as tensors:
            return {what: tensors.get_tensor(name) for what, name in self.named(path).items()}


class PackageWeights(StoredWeights):
    """The constants of a package that contain a part's tensors."""

    def __init__(self, package: Path, part: Part, prefix: str = "model.", chosen: Chosen | None = None) -> None:
        """Read the program.

        Args:
            package: the .mlpackage.
            part: the part that was converted to the package.
            prefix: begins the checkpoint's names where transformers' begin with "model.".
            chosen: a quantiser's results, which the package should contain.
        """
        super().__init__(part, package.name, prefix)
        self.chosen = chosen
        first, *others = map(_constants, load_spec(package).mlProgram.functions.values())
        self.package, self.ops = package, first
        for other in others:
            _demand_shared(first, other, package.name)

    def stored(self, path: str) -> Stored:
        """Return a constant as it is stored."""
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
        """Return a value of the protobuf, with a new reader each time, since a reader caches all values."""
        from coremltools.converters.mil.frontend.milproto.load import TranscriptionContext, _load_value

        files = TranscriptionContext(str(self.package / MODEL_FILE.parent / "weights"))
        return torch.from_numpy(np.asarray(_load_value(files, value)))

    def op(self, path: str) -> Any:
        """Return the operation that contains a constant."""
        for candidate in (f"{stem(path)}_to_fp16{suffix}" for suffix in ("_quantized", "_palettized", "")):
            if candidate in self.ops:
                return self.ops[candidate]
        raise GateError(f"{self.package.name} does not hold {path}: no constant {stem(path)}")


def _constants(function: Any) -> dict[str, Any]:
    """Return the operations of a function that contain constants, by their results."""
    operations = function.block_specializations[function.opset].operations
    return {op.outputs[0].name: op for op in operations if op.type.startswith("const")}


def _demand_shared(one: Mapping[str, Any], other: Mapping[str, Any], package: str) -> None:
    """Raise GateError if two functions of a package do not read the same weights from the same places."""
    mine, theirs = ({name: places for name, op in ops.items() if (places := _places(op))} for ops in (one, other))
    if mine != theirs:
        strange = min(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        raise GateError(f"{package}: its functions do not share {strange}")


def _places(op: Any) -> list[int]:
    """Return the offsets of a constant's numbers in the weight file; empty if they are inline in the program."""
    bound = [argument.value for key in sorted(op.inputs) for argument in op.inputs[key].arguments]
    values = [*(op.attributes[key] for key in sorted(op.attributes)), *bound]
    return [int(value.blobFileValue.offset) for value in values if value.WhichOneof("value") == "blobFileValue"]
