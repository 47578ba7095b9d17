"""Residency: every operation counts, and what is not known counts as failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import portable_coreml
import pytest
import templates
import tiny
from kit_runner.compute_plan import measured_status, planned

from shardmill.convert.stamped import convert_stamped
from shardmill.errors import GateError
from shardmill.gates import residency
from shardmill.gates.residency import Row, placement_measurements
from shardmill.models.interface import FIXED, EntryPoints

from .judged import judge

ANE, CPU, GPU = "MLNeuralEngineComputeDevice", "MLCPUComputeDevice", "MLGPUComputeDevice"


def compiled(package: Path, bundle: Path) -> Path:
    """Compile a package as this machine does."""
    import coremltools as ct

    portable_coreml.install("fp32")
    return Path(ct.models.utils.compile_model(str(package), str(bundle)))


def row(status: str, operation: str = "ios18.conv") -> Row:
    return Row("T=1", "main", "out", operation, status, "", "predicted", ("D3",))


@pytest.mark.parametrize(
    ("kind", "device", "able", "status"),
    [
        ("ios18.conv", ANE, (CPU, ANE), "ane"),
        ("ios18.conv", CPU, (CPU,), "ineligible"),
        ("ios18.conv", GPU, (CPU, GPU), "ineligible"),
        ("ios18.conv", CPU, (CPU, GPU, ANE), "not_chosen"),
        ("ios18.conv", "", (), "unknown"),
        ("ios18.softmax", "", (), "unknown"),
        ("const", "", (), "no_device"),
        ("ios18.constexpr_blockwise_shift_scale", "", (), "no_device"),
        ("ios18.read_state", "", (), "no_device"),
        ("ios18.write_state", "", (), "unknown"),
    ],
)
def test_what_a_plan_s_answer_means(kind: str, device: str, able: tuple[str, ...], status: str) -> None:
    assert measured_status(kind, device, able) == status


def test_only_a_small_program_may_be_left_to_the_cpu() -> None:
    """Rule W5: the dispatcher does not find it worth while. Nothing is asked of a prediction."""
    measured = [replace(row("ane"), evidence="measured"), replace(row("not_chosen"), evidence="measured")]
    with pytest.raises(GateError, match="not_chosen is 1, must be <= 0"):
        judge("residency", placement_measurements(measured, []))
    small = judge("residency", placement_measurements(measured, [{"severity": "warn", "rule": "W5", "why": "small"}]))
    predicted = judge("residency", placement_measurements([row("eligible")], []))
    assert "not_chosen" not in {number["name"] for number in [*small, *predicted]}


@pytest.mark.parametrize("status", ["ineligible", "unknown"])
def test_one_operation_is_enough_to_fail(status: str) -> None:
    rows = [row("ane"), row("eligible"), row("no_device", "const"), row(status, "ios18.topk")]
    with pytest.raises(GateError, match=rf"{status} is 1, must be <= 0 \(first: ios18\.topk out D3\)"):
        judge("residency", placement_measurements(rows, []))
    judge("residency", placement_measurements(rows[:-1], []))


def test_an_error_of_the_whole_program_fails_too() -> None:
    finding = {"severity": "error", "rule": "D3", "why": "mixes fixed and flexible inputs"}
    with pytest.raises(GateError, match="program_findings is 1, must be <= 0 .*D3: mixes fixed"):
        judge("residency", placement_measurements([row("ane")], [finding]))
    judge("residency", placement_measurements([row("ane")], [{**finding, "severity": "warning"}]))


@pytest.mark.parametrize("name", ["layers_00_02", "head_0"])
def test_our_own_programs_are_predicted_to_be_resident(built: tiny.Build, name: str) -> None:
    rows, findings = residency.predict(built.packages[name], 4)
    judge(name, placement_measurements(rows, findings))
    assert {r.evidence for r in rows} == {"predicted"}
    assert {r.shape for r in rows} == {"T=1..4"}
    assert sum(r.operation.endswith("conv") for r in rows) == {"layers_00_02": 8, "head_0": 1}[name]
    assert not any(r.device for r in rows)  # a prediction names no device


def test_a_plan_s_operations_have_the_names_of_the_prediction_s(built: tiny.Build, tmp_path: Path) -> None:
    """Or the two can't be compared: a write to a state has no output to be named by."""
    predicted, _ = residency.predict(built.packages["layers_00_02"], 4)
    bundle = compiled(built.packages["layers_00_02"], tmp_path / "m.mlmodelc")
    measured = list(residency.measure_placement(bundle, "T=1"))
    assert [(r.function, r.output) for r in measured] == [(r.function, r.output) for r in predicted]
    assert "k_0" in {r.output for r in measured if r.operation.split(".")[-1] == "write_state"}


def test_a_program_that_a_named_system_does_not_take_fails(built: tiny.Build, tmp_path: Path) -> None:
    """By the size of its weight file; unnamed, it is a warning, which fails nothing."""
    package = tmp_path / "large.mlpackage"
    shutil.copytree(built.packages["layers_00_02"], package)
    os.truncate(next(package.rglob("weight.bin")), (1 << 30) + 1)  # a sparse file

    def judged(*systems: str) -> tuple[list[tuple[str, str]], float | None]:
        rows, findings = residency.predict(package, 4, systems=systems)
        large = [(found["rule"], found["severity"]) for found in findings if found["rule"] in ("W1", "W2")]
        counts = {one.name: one.value for one in placement_measurements(rows, findings)}
        return large, counts["program_findings"]

    assert judged() == ([("W1", "warn"), ("W2", "warn"), ("W2", "warn")], 0)
    assert judged("macOS 15", "macOS 26") == ([], 0)
    assert judged("macOS 26", "macOS 27") == ([("W1", "error")], 1)


def test_each_function_is_judged_at_its_own_width(built: tiny.Build, tmp_path: Path) -> None:
    part, path = built.parts["layers_02_03"].changed(calls=EntryPoints(FIXED, (1, 4))), tmp_path / "p.mlpackage"
    convert_stamped(part, built.source, "int8", path, templates.FOLDER)
    bundle = compiled(path, tmp_path / "p.mlmodelc")
    rows, findings = residency.inspect_placement(path, bundle, 4, functions={"t1": 1, "t4": 4})
    judge("p", placement_measurements(rows, findings))
    assert {(r.function, r.shape) for r in rows} == {("t1", "T=1"), ("t4", "T=4")}
    assert {sum(r.operation.endswith("conv") for r in rows if r.function == name) for name in ("t1", "t4")} == {4}


def test_a_function_that_a_plan_leaves_out_is_measured_all_the_same(
    built: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core ML's plan of a program of several functions names the default one; the others would pass unseen."""
    part, path = built.parts["layers_02_03"].changed(calls=EntryPoints(FIXED, (1, 4))), tmp_path / "p.mlpackage"
    convert_stamped(part, built.source, "int8", path, templates.FOLDER)
    portable_coreml.install("fp32")

    def only_the_default(bundle: Path) -> Iterator[dict[str, Any]]:
        rows = list(planned(bundle))
        return (row for row in rows if row["function"] == min(r["function"] for r in rows))

    monkeypatch.setattr(residency, "planned", only_the_default)
    rows = list(residency.measure_functions(path, {"t1": 1, "t4": 4}))
    predicted, _ = residency.predict(path, 4, fixed=True)
    assert [(r.function, r.output) for r in rows] == [(r.function, r.output) for r in predicted]
    assert {(r.function, r.shape, r.evidence) for r in rows} == {("t1", "T=1", "measured"), ("t4", "T=4", "measured")}
