"""MLComputePlan and MLModelStructure on the portable engine.

Core ML answers from its compiler; this module answers from the rule book (judge/placement.py and judge/rules/). Every
device and cost is predicted, as `ComputePlanProxy.evidence` states. An operation that no rule knows has no device
usage, as in Core ML if the device is unknown. Eligible is not chosen: an eligible operation supports the Neural Engine.
It prefers the Neural Engine unless a rule says that the dispatcher leaves the whole function on the CPU.
"""

from __future__ import annotations

from typing import Any

from portable_coreml.errors import ProgramError
from portable_coreml.files.model import LoadedModel, pick_function
from portable_coreml.judge.rule import Target, label, subjects
from portable_coreml.program import Block, Named, Op, Program

_NOT_CHOSEN = ("W5",)  # rules for eligible operations that the dispatcher leaves on the CPU


class DeviceProxy:
    """Base of the compute device proxies; coremltools subclasses them for remote devices."""


class CPUComputeDeviceProxy(DeviceProxy):
    """The CPU."""


class GPUComputeDeviceProxy(DeviceProxy):
    """The GPU."""


class NeuralEngineComputeDeviceProxy(DeviceProxy):
    """A Neural Engine that this machine does not have: it stands in predicted compute plans."""

    def get_total_core_count(self) -> int:
        return 16  # every Mac with Apple silicon but the Ultra models


class ComputePlanProxy:
    """The predicted plan of one model."""

    evidence = "predicted"

    def __init__(self, model: LoadedModel | None = None, compute_units: str = "ALL") -> None:
        from portable_coreml.judge.placement import Verdicts, judge_model

        self._model = model
        self._units = compute_units
        self.model_structure = None if model is None else model_structure(model.program)
        verdicts = Verdicts((), ()) if model is None else judge_model(model, Target())
        self._status = {(row.function, row.output): row.status for row in verdicts.rows}
        self._on_cpu = {finding.function for finding in verdicts.findings if finding.rule in _NOT_CHOSEN}
        self._costs: dict[tuple[str, str], float] | None = None

    def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
        """Return predicted devices of an operation of `model_structure`; None if it has no device or an unknown one."""
        from coremltools.models.compute_plan import MLComputePlanDeviceUsage

        status = self._status.get(operation.__proxy__, "unknown")
        if status in ("unknown", "no_device"):
            return None
        cpu, gpu, engine = devices()
        supported = [cpu] + [gpu] * (self._units in ("ALL", "CPU_AND_GPU"))
        if status != "eligible" or self._units not in ("ALL", "CPU_AND_NE"):
            return MLComputePlanDeviceUsage(cpu, supported)
        preferred = cpu if operation.__proxy__[0] in self._on_cpu else engine
        return MLComputePlanDeviceUsage(preferred, [*supported, engine])

    def get_compute_device_usage_for_neuralnetwork_layer(self, layer: Any) -> None:
        """Raise an error, since the portable engine has no neural network models."""

    def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> Any:
        """Return predicted share of the function's work at its default shapes (judge/placement.py).

        None for an operation without a device, and where shares can't be told.
        """
        from coremltools.models.compute_plan import MLComputePlanCost

        if self._costs is None:
            self._costs = {} if self._model is None else costs(self._model)
        share = self._costs.get(operation.__proxy__)
        return None if share is None else MLComputePlanCost(share)


def costs(model: LoadedModel) -> dict[tuple[str, str], float]:
    """Return an operation's share of the work by (function, label), for functions whose shares are known."""
    from portable_coreml.judge.loadable import default_shapes
    from portable_coreml.judge.placement import cost_shares
    from portable_coreml.judge.shapes import infer_shapes

    shares: dict[tuple[str, str], float] = {}
    for subject in subjects(model, Target()):
        name = subject.function.name
        try:
            shapes = infer_shapes(subject.function, default_shapes(*pick_function(model, name)))
        except ProgramError:
            continue  # not a function that Core ML would load: there is no plan for it
        shares |= {(name, operation): share for operation, share in cost_shares(subject, shapes).items()}
    return shares


def compute_plan(model: LoadedModel, compute_units: str) -> Any:
    """Return an MLComputePlan for a model."""
    from coremltools.models.compute_plan import MLComputePlan

    return MLComputePlan(ComputePlanProxy(model, compute_units))


def devices() -> list[Any]:
    """Return the CPU, GPU and Neural Engine. Only the first is present on a machine without Core ML."""
    from coremltools.models import compute_device as device

    return [
        device.MLCPUComputeDevice(CPUComputeDeviceProxy()),
        device.MLGPUComputeDevice(GPUComputeDeviceProxy()),
        device.MLNeuralEngineComputeDevice(NeuralEngineComputeDeviceProxy()),
    ]


def model_structure(program: Program) -> Any:
    """Return a program as coremltools' MLModelStructure."""
    from coremltools.models import compute_plan as plan

    functions = {
        name: plan.MLModelStructureProgramFunction(_named(function.inputs), _block(function.block, name))
        for name, function in program.functions.items()
    }
    return plan.MLModelStructure(None, plan.MLModelStructureProgram(functions), None)


def _named(items: tuple[Named, ...]) -> list[Any]:
    from coremltools.models import compute_plan as plan

    return [plan.MLModelStructureProgramNamedValueType(i.name, plan.MLModelStructureProgramValueType()) for i in items]


def _block(block: Block, function: str) -> Any:
    from coremltools.models import compute_plan as plan

    return plan.MLModelStructureProgramBlock(
        _named(block.inputs), [_operation(op, function) for op in block.ops], list(block.outputs)
    )


def _operation(op: Op, function: str) -> Any:
    from coremltools.models import compute_plan as plan

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
