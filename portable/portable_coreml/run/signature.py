"""What a model accepts and returns: checks a prediction's inputs as Core ML does and converts them, both ways.

A wrong name, a missing input, a shape out of range and a value of the wrong kind are InputErrors that say which
input. Numbers are converted where nothing is lost: any integer or float array may feed a float input; a float array
may feed an integer input only if its values are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import InputError, PortableError, ProgramError
from portable_coreml.files.features import feature_of
from portable_coreml.program import Function, Named, TensorType
from portable_coreml.run.lowered import round_half
from portable_coreml.run.ops import extra_package

_NUMPY_OUT = {name: np.dtype(kind) for name, kind in (("fp32", np.float32), ("fp64", np.float64), ("int32", np.int32))}


class Signature:
    """The inputs and outputs of one function, checked against its parameters."""

    def __init__(self, function: Function, description: Any, params: Sequence[Named], half: bool) -> None:
        self.params = params
        self.half = half
        self.images = {m.name: m for m in description.input if m.type.WhichOneof("Type") == "imageType"}
        self.image_outputs = {m.name: m for m in description.output if m.type.WhichOneof("Type") == "imageType"}
        self.features = {m.name: feature_of(m) for m in description.input}
        self.outputs = {m.name: feature_of(m) for m in description.output}
        for item in params:
            if item.name not in self.features:
                raise ProgramError(
                    f"function '{function.name}': parameter '{item.name}' is not in the model's description"
                )

    def convert(self, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return checked tensors for the function's parameters. Raises InputError."""
        for name in data:
            if name not in self.features:
                raise InputError(f"the model has no input '{name}'; its inputs are {sorted(self.features)}")
        return {item.name: self._one(item, data.get(item.name)) for item in self.params}

    def _one(self, item: Named, value: Any) -> Tensor:
        feature, kind = self.features[item.name], item.type
        assert isinstance(kind, TensorType)
        if value is None:
            if not feature.optional:
                raise InputError(f"input '{item.name}' is missing")
            return torch.full(feature.shape, feature.default or 0.0).to(BY_NAME[kind.dtype].torch)
        if item.name in self.images:
            array = _pictures(item.name).image_to_array(value, self.images[item.name], item.name)
        else:
            array = value if isinstance(value, np.ndarray) else np.asarray(value)
            feature.check(array.shape)
        return to_tensor(array, kind, item.name, self.half)

    def results(
        self, names: Sequence[str], values: Sequence[Tensor], kinds: Mapping[str, TensorType]
    ) -> dict[str, Any]:
        """Return arrays (or images) for the function's outputs, as the model's description declares them."""
        arrays: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            if name in self.image_outputs:
                arrays[name] = _pictures(name).array_to_image(value.numpy(), self.image_outputs[name])
                continue
            if not isinstance(value, Tensor):
                arrays[name] = value
                continue
            declared = self.outputs[name].dtype if name in self.outputs else kinds[name].dtype
            array = np.atleast_1d(value.numpy())  # Core ML has no outputs of rank 0
            wanted = np.dtype(np.float16) if self.half and declared == "fp16" else _NUMPY_OUT.get(declared, array.dtype)
            arrays[name] = array.astype(wanted, copy=not value.is_contiguous())
        return arrays


def _pictures(name: str) -> Any:
    """Return the module that converts PIL images. Raises PortableError if it is not installed."""
    package = extra_package()
    if package is None:
        raise PortableError(f"'{name}' is an image; portable-coreml-extra, which converts images, is not installed")
    return package.pictures


def to_tensor(array: np.ndarray, kind: TensorType, name: str, half: bool) -> Tensor:
    """Return an input array in the type in which its parameter is kept, rounded to fp16 in fp16 mode.

    Raises InputError for values that don't fit it.
    """
    if array.dtype.kind not in "fiub":
        raise InputError(f"input '{name}' holds {array.dtype}; the model takes {kind.dtype}")
    dtype = BY_NAME[kind.dtype].torch
    if array.dtype.kind == "f" and not dtype.is_floating_point and dtype != torch.bool:
        if not np.array_equal(array, np.trunc(array)):
            raise InputError(f"input '{name}' holds fractions; the model takes {kind.dtype}")
        _check_range(array, kind, name)
        array = array.astype(np.int64)
    if array.dtype.kind in "iu" and not dtype.is_floating_point and dtype != torch.bool:
        _check_range(array, kind, name)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if not array.flags.writeable or not _is_dense(array) or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    tensor = torch.from_numpy(array)
    tensor = tensor if tensor.dtype == dtype else tensor.to(dtype)
    return round_half(tensor) if half and kind.dtype == "fp16" else tensor


def _check_range(array: np.ndarray, kind: TensorType, name: str) -> None:
    """Raise InputError for numbers that the integer type of a parameter can't hold."""
    limits = np.iinfo(BY_NAME[kind.dtype].numpy)
    narrower = array.dtype.kind in "iu" and np.can_cast(array.dtype, BY_NAME[kind.dtype].numpy)
    if not narrower and array.size and (array.min() < limits.min or array.max() > limits.max):
        raise InputError(f"input '{name}' holds numbers that do not fit into {kind.dtype}")


def _is_dense(array: np.ndarray) -> bool:
    """Return whether an array fills its memory without gaps, with its axes in any order."""
    return array.flags.c_contiguous or array.transpose(np.argsort(array.strides)[::-1]).flags.c_contiguous
