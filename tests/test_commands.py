"""Commands that judge and compare: lint, diff-residency, compare-compiled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from shardmill import host
from shardmill.cli import app
from shardmill.commands import audit_range
from shardmill.engine import Engine
from shardmill.manifest import in_place

runner = CliRunner()


def test_lint_says_which_rule_and_fails_on_an_error(tmp_path: Path) -> None:
    """fp32 inputs and outputs are never resident (T1): the rows say so, and the exit code does."""
    import coremltools as ct
    import torch

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    traced = torch.jit.trace(Double(), torch.zeros(1, 64, 1, 64))
    for name, precision in (("wide", ct.precision.FLOAT32), ("half", ct.precision.FLOAT16)):
        kind = np.float32 if name == "wide" else np.float16
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("x", (1, 64, 1, 64), kind)],
            outputs=[ct.TensorType("y", dtype=kind)],
            compute_precision=precision,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
        model.save(str(tmp_path / f"{name}.mlpackage"))
    wide = runner.invoke(app, ["lint", str(tmp_path / "wide.mlpackage"), "--json"])
    rules = {row["rule"] for row in json.loads(wide.stdout) if row["severity"] == "error"}
    assert (wide.exit_code, "T1" in rules) == (1, True)
    assert runner.invoke(app, ["lint", str(tmp_path / "half.mlpackage")]).exit_code == 0


def test_diff_residency_compares_a_prediction_with_a_measurement(tmp_path: Path) -> None:
    """An operation predicted eligible that a Mac ran elsewhere at one width is listed; two predictions are refused."""
    row = {"function": "main", "output": "y", "rules": []}
    reports = {
        "predicted": [row | {"status": "eligible"}],
        "measured": [row | {"status": "ane"}, row | {"status": "ineligible"}],
    }
    for evidence, rows in reports.items():
        (tmp_path / f"{evidence}.json").write_text(json.dumps({"evidence": evidence, "rows": rows}))
    both = [str(tmp_path / "predicted.json"), str(tmp_path / "measured.json")]
    differs = runner.invoke(app, ["diff-residency", *both])
    assert (differs.exit_code, "predicted eligible, measured ineligible" in differs.stdout) == (1, True)
    refused = runner.invoke(app, ["diff-residency", both[0], both[0]])
    assert refused.exit_code == 1


def test_compare_compiled_refuses_what_is_no_bundle(tmp_path: Path) -> None:
    """A folder that is no compiled program is named, not compared."""
    refused = runner.invoke(app, ["compare-compiled", str(tmp_path), str(tmp_path)])
    assert (refused.exit_code, "no compiled bundle" in refused.output) == (1, True)


def test_audit_range_sees_every_program_and_names_what_overflows(built: tiny.Build) -> None:
    """A sound model stays in fp16; with an embedding that has left it already, what follows is counted."""
    if not host.is_portable():
        pytest.skip("looks inside the portable engine, which does not run on a Mac")
    with host.load_programs_as("fp16"):
        engine = Engine(in_place(built.plan, built.packages, built.table), Path("/"))
    rows = audit_range.audit(engine, built.text[:8])
    assert {row["program"] for row in rows} == set(built.packages)
    assert not any(row["overflows"] or row["nans"] for row in rows)
    assert all(row["headroom"] > 6 for row in rows)  # the mask's -1e4 is the largest there is
    engine.table = np.full_like(engine.table, np.inf)
    spoilt = audit_range.audit(engine, built.text[:8])
    assert any(row["overflows"] for row in spoilt)
    assert any(row["nans"] for row in spoilt)
