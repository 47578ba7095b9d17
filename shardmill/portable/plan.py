"""MLComputePlan and MLModelStructure on the portable engine.

Where Core ML answers from its compiler, this answers from the rule book (placement/): every device named here is
predicted, which `ComputePlanProxy.evidence` says. An operation that no rule knows has no device usage, as where
Core ML can't tell.
"""

from __future__ import annotations

from typing import Any

from .load import LoadedModel
from .placement.judge import judge_model
from .placement.subject import Target, label
from .program import Block, Named, Op, Program


class DeviceProxy:
    """Base of the compute device proxies; coremltools subclasses them for remote devices."""


class CPUComputeDeviceProxy(DeviceProxy):
    pass


class GPUComputeDeviceProxy(DeviceProxy):
    pass


class NeuralEngineComputeDeviceProxy(DeviceProxy):
    """A Neural Engine that this machine does not have: it stands in predicted compute plans."""

    def get_total_core_count(self) -> int:
        return 16  # every Mac with Apple silicon but the Ultra models


class ComputePlanProxy:
    """The predicted plan of one model."""

    evidence = "predicted"

    def __init__(self, model: LoadedModel | None = None, compute_units: str = "ALL") -> None:
        self._model = model
        self._units = compute_units
        self.model_structure = None if model is None else model_structure(model.program)
        rows = () if model is None else judge_model(model, Target()).rows
        self._status = {(row.function, row.output): row.status for row in rows}

    def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
        """Predicted devices of an operation of `model_structure`; None where it has none or none is known."""
        from coremltools.models.compute_plan import MLComputePlanDeviceUsage  # noqa: PLC0415 - imports this module's classes

        status = self._status.get(operation.__proxy__, "unknown")
        if status in ("unknown", "no_device"):
            return None
        cpu, gpu, engine = devices()
        supported = [cpu] + [gpu] * (self._units in ("ALL", "CPU_AND_GPU"))
        on_engine = status == "eligible" and self._units in ("ALL", "CPU_AND_NE")
        return MLComputePlanDeviceUsage(engine if on_engine else cpu, [*supported, engine] if on_engine else supported)

    def get_compute_device_usage_for_neuralnetwork_layer(self, layer: Any) -> None:
        """The portable engine has no neural network models."""

    def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> None:
        """Costs are not predicted: Core ML's estimates are not public."""


def compute_plan(model: LoadedModel, compute_units: str) -> Any:
    """An MLComputePlan for a model."""
    from coremltools.models.compute_plan import MLComputePlan  # noqa: PLC0415

    return MLComputePlan(ComputePlanProxy(model, compute_units))


def devices() -> list[Any]:
    """CPU, GPU and Neural Engine. Only the first is present on a machine without Core ML."""
    from coremltools.models import compute_device as device  # noqa: PLC0415

    return [
        device.MLCPUComputeDevice(CPUComputeDeviceProxy()),
        device.MLGPUComputeDevice(GPUComputeDeviceProxy()),
        device.MLNeuralEngineComputeDevice(NeuralEngineComputeDeviceProxy()),
    ]


def model_structure(program: Program) -> Any:
    """A program as coremltools' MLModelStructure."""
    from coremltools.models import compute_plan as plan  # noqa: PLC0415

    functions = {
        name: plan.MLModelStructureProgramFunction(_named(function.inputs), _block(function.block, name))
        for name, function in program.functions.items()
    }
    return plan.MLModelStructure(None, plan.MLModelStructureProgram(functions), None)


def _named(items: tuple[Named, ...]) -> list[Any]:
    from coremltools.models import compute_plan as plan  # noqa: PLC0415

    return [plan.MLModelStructureProgramNamedValueType(i.name, plan.MLModelStructureProgramValueType()) for i in items]


def _block(block: Block, function: str) -> Any:
    from coremltools.models import compute_plan as plan  # noqa: PLC0415

    return plan.MLModelStructureProgramBlock(
        _named(block.inputs), [_operation(op, function) for op in block.ops], list(block.outputs)
    )


def _operation(op: Op, function: str) -> Any:
    from coremltools.models import compute_plan as plan  # noqa: PLC0415

    inputs = {
        key: plan.MLModelStructureProgramArgument(
            [
                plan.MLModelStructureProgramBinding(b, None)
                if isinstance(b, str)
                else plan.MLModelStructureProgramBinding(None, plan.MLModelStructureProgramValue())
                for b in bindings
            ]
        )
        for key, bindings in op.inputs.items()
    }
    return plan.MLModelStructureProgramOperation(
        inputs=inputs,
        operator_name=op.kind,
        outputs=_named(op.outputs),
        blocks=[_block(block, function) for block in op.blocks],
        __proxy__=(function, label(op)),
    )
