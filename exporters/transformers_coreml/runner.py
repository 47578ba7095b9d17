"""Runs an exported program: in Core ML on a Mac, elsewhere in portable-coreml."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.proto import FeatureTypes_pb2, Model_pb2
from torch import Tensor
from transformers.exporters.metadata import ExportMetadata
from transformers.exporters.runners.base import ModelRunner
from transformers.exporters.utils import get_leaf_tensors

FROZEN = "transformers.frozen"  # in the package's metadata: the values of inputs that are constants
KINDS = FeatureTypes_pb2.ArrayFeatureType
DTYPES = {KINDS.FLOAT16: np.float16, KINDS.FLOAT32: np.float32, KINDS.INT32: np.int32}


def feature_name(path: str) -> str:
    """Return the name of an input or output, given the path of a tensor in the model's arguments or results."""
    return re.sub(r"\W", "_", path)


def _computes_in_half(spec: Model_pb2.Model) -> bool:
    """Return whether the first output that is no integer has fp16."""
    kinds = [output.type.multiArrayType.dataType for output in spec.description.output]
    return next((kind == KINDS.FLOAT16 for kind in kinds if kind != KINDS.INT32), False)


class CoreMLRunner(ModelRunner):  # type: ignore[misc]
    """Calls a program as the model it was exported from is called."""

    def __init__(self, program: ct.models.MLModel, metadata: ExportMetadata, frozen: Mapping[str, Any]) -> None:
        """Keep a loaded program, and read what its inputs are.

        Args:
            program: a loaded program.
            metadata: what the exporter recorded.
            frozen: the values of inputs that are constants, as nested lists.
        """
        super().__init__(metadata)
        self.program = program
        description = program.get_spec().description
        self.inputs = {one.name: one.type.multiArrayType for one in description.input}
        self.outputs = [one.name for one in description.output]
        self.frozen = frozen

    @property
    def device(self) -> torch.device:
        """Return where tensors are handed over."""
        return torch.device("cpu")

    @classmethod
    def from_program(
        cls, program: ct.models.MLModel, metadata: ExportMetadata, device: Any = None, precision: str | None = None
    ) -> CoreMLRunner:
        """Load a program.

        Args:
            program: as an export returns it, or `CoreMLExporter.load_program`.
            metadata: what the exporter recorded.
            device: None, "ane" or "cpu": on a Mac the units that Core ML may use. "ane" is the default.
            precision: without Core ML, "fp16", as the Neural Engine computes, or "fp32"; by default the program's own.

        Raises:
            ValueError: an unknown device or precision.
            RuntimeError: this is no Mac, and portable-coreml is not installed.
        """
        if device not in (None, "ane", "cpu"):
            raise ValueError(f"device is {str(device)!r}, must be 'ane' or 'cpu'")
        if sys.platform != "darwin":
            _install(precision or ("fp16" if _computes_in_half(program.get_spec()) else "fp32"))
        units = ct.ComputeUnit.CPU_ONLY if device == "cpu" else ct.ComputeUnit.CPU_AND_NE
        frozen = json.loads(program.user_defined_metadata.get(FROZEN, "{}"))
        return cls(ct.models.MLModel(program.package_path, compute_units=units), metadata, frozen)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Any:
        """Run the program; see transformers' base class. Raises ValueError for missing inputs, or other frozen ones."""
        for name, value in self.frozen.items():
            passed = kwargs.get(name)
            if isinstance(passed, Tensor) and passed.tolist() != value:
                raise ValueError(
                    f"{name} is {value} in this program, whatever is passed; export again for {passed.tolist()}"
                )
        leaves = {feature_name(path): leaf for path, leaf in get_leaf_tensors(kwargs).items()}
        missing = [name for name in self.inputs if name not in leaves]
        if missing:
            raise ValueError(
                f"the program takes {missing[0]}, which is not among {', '.join(kwargs) or 'no arguments'}"
            )
        arrays = {}
        for name, kind in self.inputs.items():
            array = leaves[name].detach().cpu().numpy().astype(DTYPES[kind.dataType])
            arrays[name] = array if array.ndim else array[None]
        results = self.program.predict(arrays)
        return self.unflatten([_tensor(results[name]) for name in self.outputs])


def _install(precision: str) -> None:
    try:
        import portable_coreml
    except ImportError:
        raise RuntimeError("no Core ML here: install portable-coreml, which runs programs on other systems") from None
    portable_coreml.install(precision)


def _tensor(array: Any) -> Tensor:
    """Return an output as transformers would: numbers in fp32."""
    array = np.asarray(array)
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float16 else array)
