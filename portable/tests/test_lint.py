"""Lint rows, comparisons with a Mac's reports, and the rules' page."""

from __future__ import annotations

from pathlib import Path

import pytest
from portable_coreml.files.bundle import compile_model
from portable_coreml.judge.lint import compare_compiled, diff_residency, lint, rules_page
from portable_coreml.judge.placement import RULES, judge_package

ROOT = Path(__file__).resolve().parents[2]


def test_a_sound_package_and_its_bundle_have_no_errors(attention_package: Path, tmp_path: Path) -> None:
    """The same rows from protobuf and from text; warnings come with a remedy."""
    bundle = compile_model(attention_package, tmp_path / "m.mlmodelc")
    rows = lint(attention_package)
    assert rows == lint(bundle)
    assert {row.severity for row in rows} <= {"warn", "info"}
    assert {row.rule for row in rows} >= {"S7", "W5", "D2"}
    assert all(row.remedy and row.why for row in rows)


def test_every_operation_of_the_contracts_attention_is_eligible(attention_package: Path) -> None:
    """The graph contract was chosen so: nothing ineligible, nothing unknown."""
    statuses = {row.status for row in judge_package(attention_package).rows}
    assert statuses == {"eligible", "no_device"}


def test_reports_are_compared_operation_by_operation() -> None:
    """A wrong prediction and a missing row are differences; an unknown one is not."""
    predicted = [
        {"output": "a", "status": "eligible"},
        {"output": "b", "status": "unknown"},
        {"output": "c", "status": "ineligible", "rules": ["T2"]},
        {"output": "d", "status": "eligible"},
    ]
    measured = [{"output": "a", "device": "ne"}, {"output": "b", "device": "cpu"}, {"output": "c", "device": "NE"}]
    found = [(d.output, d.predicted, d.measured, d.rules) for d in diff_residency(predicted, measured)]
    assert found == [("c", "ineligible", "eligible", ("T2",)), ("d", "eligible", "absent", ())]


def test_bundles_are_compared_but_for_what_may_differ(attention_package: Path, tmp_path: Path) -> None:
    """buildInfo may differ; a changed line, a changed weight file and a missing file may not."""
    one, two = (compile_model(attention_package, tmp_path / n / "m.mlmodelc") for n in ("a", "b"))
    text = (two / "model.mil").read_text()
    (two / "model.mil").write_text(text.replace("shardmill-portable", "3600.16.1"))
    assert compare_compiled(one, two) == ()
    (two / "model.mil").write_text(text.replace("softmax(", "relu("))
    weights = (two / "weights" / "weight.bin").read_bytes()
    (two / "weights" / "weight.bin").unlink()
    (two / "weights" / "weight.bin").write_bytes(weights[:-1] + b"x")
    (two / "analytics" / "coremldata.bin").unlink()
    assert [d.file for d in compare_compiled(one, two)] == [
        "analytics/coremldata.bin",
        "model.mil",
        "weights/weight.bin",
    ]


def test_headers_and_trailers_of_equal_descriptions_are_compared(attention_package: Path, tmp_path: Path) -> None:
    """The number of the format, at byte 4, is what no public bundle of specification 9 settles."""
    one, two = (compile_model(attention_package, tmp_path / n / "m.mlmodelc") for n in ("a", "b"))
    data = (two / "coremldata.bin").read_bytes()
    (two / "coremldata.bin").write_bytes(data[:4] + b"\5" + data[5:])
    (difference,) = compare_compiled(one, two)
    assert (difference.file, difference.what) == (
        "coremldata.bin",
        "the headers differ, first at their byte 4: 09 and 05",
    )
    (two / "coremldata.bin").write_bytes(data[:-16])
    (difference,) = compare_compiled(one, two)
    assert difference.what == "the trailers differ, first at their byte 0: f6 and nothing"


def test_the_page_has_every_rule() -> None:
    """Each rule with its sources; contested ones say so."""
    page = rules_page()
    assert all(f"## {rule.id}: {rule.title}" in page for rule in RULES)
    assert page.count("- contested:") == sum(bool(rule.contested) for rule in RULES)


def test_the_page_in_docs_is_the_rules() -> None:
    """docs/ane-rules.md is generated; an edit of the rules without it fails here."""
    path = ROOT / "docs" / "ane-rules.md"
    if not path.exists():
        pytest.skip(
            "docs/ane-rules.md has not been generated: python -m portable_coreml.judge.lint > docs/ane-rules.md"
        )
    assert path.read_text(encoding="utf-8") == rules_page()


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
    from portable_coreml.files.load import load_model
    from portable_coreml.judge.placement import subject

    monkeypatch.setattr(subject, "weight_bytes", lambda model, function: 20_000_000)
    for units, device in (("ALL", "NeuralEngine"), ("CPU_AND_NE", "NeuralEngine"), ("CPU_ONLY", "CPU")):
        made = compute_plan.compute_plan(load_model(attention_package), units)
        (last,) = [
            op
            for op in made.model_structure.program.functions["main"].block.operations
            if op.outputs and op.outputs[0].name == "hidden"
        ]
        used = made.get_compute_device_usage_for_mlprogram_operation(last)
        assert device in type(used.preferred_compute_device).__name__
