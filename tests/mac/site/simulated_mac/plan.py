"""Compute plans: MLComputePlan of a compiled model, as CoreMLPython.mm:827 and after gives it."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulated_mac import log, waiting
from simulated_mac.native_calls import abort, demand, ns_error

UNITS = ("CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE", "ALL")
OPSETS = {"CoreML5": "ios15", "CoreML6": "ios16", "CoreML7": "ios17", "CoreML8": "ios18", "CoreML9": "ios26"}


class CPUComputeDevice:
    """The CPU."""


class GPUComputeDevice:
    """The GPU."""


class NeuralEngineComputeDevice:
    """The Neural Engine."""

    def get_total_core_count(self) -> int:
        return 16


class Structure:
    """The operations of a plan. Python's objects refer to it weakly (CoreMLPython.h)."""


class Operation:
    """One operation of a plan's structure.

    Attributes:
        key: the portable engine's name of it: function and output.
    """

    def __init__(self, structure: Structure, key: tuple[str, str]) -> None:
        self.structure, self.key = weakref.ref(structure), key


class ComputePlan:
    """_MLComputePlanProxy."""

    def __init__(self, inner: Any = None, model: Any = None) -> None:
        self._inner, self._structure = inner, Structure()
        self.model_structure = None
        self._default, self._flexible = "", False
        if model is not None:
            functions = list(model.program.functions)
            self._default = model.description.defaultFunctionName or functions[0]
            opsets = {name: function.opset for name, function in model.program.functions.items()}
            self._flexible = any(_is_flexible(function) for function in model.program.functions.values())
            self.model_structure = _as_core_ml(inner.model_structure, self._structure, opsets)

    def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
        """Return the devices of an operation; None outside the default function, and after its plan has ended."""
        from coremltools.models.compute_device import MLNeuralEngineComputeDevice
        from coremltools.models.compute_plan import MLComputePlanDeviceUsage

        usage = self._ask("get_compute_device_usage_for_mlprogram_operation", operation)
        if usage is None:
            return None
        supported = [_device(device) for device in usage.supported_compute_devices]
        if self._is_off(operation.operator_name.rpartition(".")[2]):
            supported = [one for one in supported if not isinstance(one, MLNeuralEngineComputeDevice)]
            return MLComputePlanDeviceUsage(supported[0], supported)
        return MLComputePlanDeviceUsage(_device(usage.preferred_compute_device), supported)

    def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> Any:
        """Return the share of an operation in the work; None where the plan names no share."""
        return self._ask("get_estimated_cost_for_mlprogram_operation", operation)

    def get_compute_device_usage_for_neuralnetwork_layer(self, layer: Any) -> None:
        """Return None: no program has layers."""

    def _is_off(self, kind: str) -> bool:
        """Return whether MAC_OFF_ANE keeps operations of a kind off the Neural Engine, in this program."""
        named = os.environ.get("MAC_OFF_ANE", "").split(",")
        return kind in named or (self._flexible and f"range:{kind}" in named)

    def _ask(self, name: str, operation: Any) -> Any:
        proxy = operation.__proxy__
        if not isinstance(proxy, Operation):
            raise RuntimeError("Unable to cast Python instance to C++ type")
        if proxy.structure() is None or proxy.key[0] != self._default:
            return None
        return getattr(self._inner, name)(replace(operation, __proxy__=proxy.key))


def _is_flexible(function: Any) -> bool:
    """Return whether an input of a function takes a range of shapes."""
    return any(None in getattr(each.type, "shape", ()) for each in function.inputs)


def _device(device: Any) -> Any:
    """Return a device of coremltools around a class of this module, which coremltools checks."""
    return type(device)(PROXIES[type(device).__name__]())


PROXIES: dict[str, type] = {
    "MLCPUComputeDevice": CPUComputeDevice,
    "MLGPUComputeDevice": GPUComputeDevice,
    "MLNeuralEngineComputeDevice": NeuralEngineComputeDevice,
}


def devices() -> list[Any]:
    """Return the devices of this Mac."""
    from coremltools.models import compute_device

    return [getattr(compute_device, name)(proxy()) for name, proxy in PROXIES.items()]


def _as_core_ml(structure: Any, owner: Structure, opsets: dict[str, str]) -> Any:
    """Return a structure whose operations have Core ML's names, and whose functions are in another order."""
    functions = {
        name: replace(function, block=_block(function.block, owner, OPSETS.get(opsets[name], "ios15")))
        for name, function in structure.program.functions.items()
    }
    backwards = dict(sorted(functions.items(), reverse=True))  # an NSDictionary has its own order
    return replace(structure, program=replace(structure.program, functions=backwards))


def _block(block: Any, owner: Structure, opset: str) -> Any:
    return replace(block, operations=[_operation(operation, owner, opset) for operation in block.operations])


def _operation(operation: Any, owner: Structure, opset: str) -> Any:
    name = operation.operator_name
    return replace(
        operation,
        operator_name=name if name == "const" or "." in name else f"{opset}.{name}",
        blocks=[_block(block, owner, opset) for block in operation.blocks],
        __proxy__=Operation(owner, operation.__proxy__),
    )


def load(*arguments: Any) -> Any:
    """Load a compute plan, as get_compute_plan; something that is not compiled ends the process."""
    demand(len(arguments) == 2 and all(isinstance(argument, str) for argument in arguments), "get_compute_plan")
    path, units = arguments
    if units not in UNITS:
        abort('computeUnits == "ALL"', units=units)  # CoreMLPython.mm, setComputeUnit
    if not path.rstrip("/").endswith(".mlmodelc"):
        abort("a compute plan of something that is not compiled", path=path)
    from coremltools.models.compute_plan import MLComputePlan
    from portable_coreml import compute_plan
    from portable_coreml.errors import PortableError
    from portable_coreml.files.bundle import load_model

    for name, proxy in PROXIES.items():
        setattr(compute_plan, f"{name.removeprefix('ML')}Proxy", proxy)  # coremltools checks whose class it is
    seconds = waiting.take("plan", path, units)
    try:
        model = load_model(Path(path))
    except PortableError as error:
        raise ns_error(str(error)) from None
    log.write("plan", path=path, functions=len(model.program.functions), seconds=seconds)
    return MLComputePlan(ComputePlan(compute_plan.ComputePlanProxy(model, units), model))
