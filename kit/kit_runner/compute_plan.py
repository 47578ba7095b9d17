"""The device that Core ML plans for each operation of a program: what gates judge, and what a kit measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WITHOUT_DEVICE = ("const", "read_state")  # rule O15: prefixes of operations without a device in a plan


def planned(bundle: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each operation: function, output, operation, status and preferred device, "" for no device."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    plan = MLComputePlan.load_from_path(str(bundle), compute_units=ct.ComputeUnit.CPU_AND_NE)
    for name, function in plan.model_structure.program.functions.items():
        for op in _nested_operations(function.block):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            device = "" if usage is None else type(usage.preferred_compute_device).__name__
            able = [] if usage is None else [type(d).__name__ for d in usage.supported_compute_devices]
            kind = op.operator_name
            status = measured_status(kind, device, able)
            yield {"function": name, "output": _output_of(op), "operation": kind, "status": status, "device": device}


def measured_status(kind: str, device: str, able: Sequence[str]) -> str:
    """Return the status that follows from a plan's devices.

    Args:
        kind: the operation's type.
        device: the device that the plan prefers; "" if it names none.
        able: the devices that support the operation.
    """
    if "NeuralEngine" in device:
        return "ane"
    if device:
        return "not_chosen" if any("NeuralEngine" in name for name in able) else "ineligible"
    plain = kind.split(".")[-1]  # "ios18.conv" -> "conv"
    return "no_device" if plain.startswith(WITHOUT_DEVICE) else "unknown"


def _output_of(op: Any) -> str:
    """Return the name of a plan's operation, as in the rules: its first output, or the state that it writes."""
    if op.outputs:
        return str(op.outputs[0].name)
    written = op.inputs["input"].bindings if "input" in op.inputs else ()
    return next((str(binding.name) for binding in written if binding.name), "")


def _nested_operations(block: Any) -> Iterator[Any]:
    """Yield all operations of a block and of its nested blocks."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from _nested_operations(inner)
