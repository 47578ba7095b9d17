"""A package's weights, dequantised by coremltools' own reader, by the checkpoint's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmill.convert.package import MODEL_FILE, load_spec
from shardmill.errors import GateError
from shardmill.plan import Part


class PackageWeights:
    """The constants of a package that hold a part's tensors."""

    def __init__(self, package: Path, part: Part) -> None:
        from coremltools.converters.mil.frontend.milproto.load import load

        spec = load_spec(package)
        folder = package / MODEL_FILE.parent / "weights"
        program = load(spec, specification_version=spec.specificationVersion, file_weights_dir=str(folder))
        (function,) = program.functions.values()
        self.package = package
        self.ops = {op.outputs[0].name: op for op in function.operations if op.op_type.startswith("const")}
        self.names = constant_names(part)

    def __call__(self, name: str) -> Tensor:
        """A tensor in fp32 with the checkpoint's shape. Raises GateError if the package does not hold it."""
        return torch.from_numpy(value(self.op(name)).astype(np.float32)).flatten(start_dim=1).squeeze()

    def scale(self, name: str) -> Tensor | None:
        """Quantisation step of each output channel [out, 1]; None for a tensor stored in fp16."""
        op = self.op(name)
        if op.op_type == "const":
            return None
        return torch.from_numpy(op.scale.val.astype(np.float32)).reshape(-1, 1)

    def op(self, name: str) -> Any:
        """The constant that holds a tensor."""
        stem = self.names[name]
        for candidate in (f"{stem}_to_fp16_quantized", f"{stem}_to_fp16"):
            if candidate in self.ops:
                return self.ops[candidate]
        raise GateError(f"{self.package.name} does not hold {name}: no constant {stem}")


def value(op: Any) -> np.ndarray[Any, Any]:
    """What a const or a per-channel constexpr stands for, the product with the scale not rounded to fp16 again."""
    if op.op_type == "const":
        stored: np.ndarray[Any, Any] = op.outputs[0].val
        return stored
    scaled: np.ndarray[Any, Any] = op.data.val.astype(np.float32) * op.scale.val.astype(np.float32)
    return scaled


def constant_names(part: Part) -> Mapping[str, str]:
    """Checkpoint name -> stem of the constant's name, which coremltools makes from the module's path."""
    names = [tensor.name.split("[")[0] for tensor in part.tensors]
    if part.kind == "head":
        return dict(zip(names, ("norm_weight", "lm_head_weight"), strict=True))
    return {name: name.removeprefix("model.").replace(".", "_") for name in names}


def weight_steps(stored: PackageWeights, original: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest distance of stored weights from the original ones in quantisation steps, and the tensor's name.

    A tensor stored in fp16 counts in steps of fp16 (2^-10 of the value, 2^-24 at least).
    """
    worst, where = 0.0, ""
    for name, values in original.items():
        scale = stored.scale(name)  # [out, 1] for a matrix
        step = (values.abs() * 2**-10).clamp(min=2**-24) if scale is None else scale
        steps = float(((stored(name) - values).abs() / step).max())
        if not steps <= worst:  # NaN too
            worst, where = steps, name
    return worst, where
