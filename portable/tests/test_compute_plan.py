"""MLComputePlan: devices and costs are predicted, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from portable_coreml.files.bundle import compile_model


def test_compute_plans_are_predicted(attention_package: Path, tmp_path: Path) -> None:
    """MLComputePlan answers from the rules and says so; constants have no device and no cost. What is eligible
    supports the engine, but is not chosen for it in a program this small (W5).
    """
    from coremltools.models.compute_device import MLCPUComputeDevice, MLNeuralEngineComputeDevice
    from coremltools.models.compute_plan import MLComputePlan

    compute_plan = MLComputePlan.load_from_path(str(compile_model(attention_package, tmp_path / "m.mlmodelc")))
    assert compute_plan.__proxy__.evidence == "predicted"
    operations = compute_plan.model_structure.program.functions["main"].block.operations
    usage = {
        op.outputs[0].name: compute_plan.get_compute_device_usage_for_mlprogram_operation(op)
        for op in operations
        if op.outputs
    }
    assert any(isinstance(d, MLNeuralEngineComputeDevice) for d in usage["hidden"].supported_compute_devices)
    assert isinstance(usage["hidden"].preferred_compute_device, MLCPUComputeDevice)
    cost = {
        op.outputs[0].name: compute_plan.get_estimated_cost_for_mlprogram_operation(op)
        for op in operations
        if op.outputs
    }
    constants = [op.outputs[0].name for op in operations if op.operator_name == "const"]
    assert all(usage[name] is None and cost[name] is None for name in constants)
    assert 0.7 < sum(found.weight for found in cost.values() if found is not None) < 1  # the rest: state writes


def test_a_large_program_is_expected_on_the_engine(attention_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program with weights of 20 MB: chosen, unless the caller leaves the engine out."""
    from portable_coreml import compute_plan
    from portable_coreml.files.bundle import load_model
    from portable_coreml.judge import rule

    monkeypatch.setattr(rule, "weight_bytes", lambda model, function: 20_000_000)
    for units, device in (("ALL", "NeuralEngine"), ("CPU_AND_NE", "NeuralEngine"), ("CPU_ONLY", "CPU")):
        made = compute_plan.compute_plan(load_model(attention_package), units)
        (last,) = [
            op
            for op in made.model_structure.program.functions["main"].block.operations
            if op.outputs and op.outputs[0].name == "hidden"
        ]
        used = made.get_compute_device_usage_for_mlprogram_operation(last)
        assert device in type(used.preferred_compute_device).__name__
