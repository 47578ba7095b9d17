"""Commands that judge and compare: lint, diff-residency, compare-compiled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from shardmill.cli import app

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
