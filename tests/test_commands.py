"""Commands that compare: diff-residency, compare-compiled."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from shardmill.cli import app

runner = CliRunner()


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
    assert "`portable-coreml diff-residency` is the command's name now\n" in differs.stderr
    refused = runner.invoke(app, ["diff-residency", both[0], both[0]])
    assert refused.exit_code == 1


def test_what_was_not_chosen_was_still_predicted_right(tmp_path: Path) -> None:
    """The rules predict what the engine can run. A small program is left to the CPU all the same (W5)."""
    for evidence, status in (("predicted", "eligible"), ("measured", "not_chosen")):
        rows = [{"function": "main", "output": "y", "status": status}]
        (tmp_path / f"{evidence}.json").write_text(json.dumps({"evidence": evidence, "rows": rows}))
    same = runner.invoke(app, ["diff-residency", str(tmp_path / "predicted.json"), str(tmp_path / "measured.json")])
    assert same.exit_code == 0
    assert "0 operations differ; 1 could run on the Neural Engine, but were given to another device" in same.stdout


def test_compare_compiled_refuses_what_is_no_bundle(tmp_path: Path) -> None:
    """A folder that is no compiled program is named, not compared."""
    refused = runner.invoke(app, ["compare-compiled", str(tmp_path), str(tmp_path)])
    assert (refused.exit_code, "not a compiled bundle" in refused.output) == (1, True)
    assert "`portable-coreml compare-compiled` is the command's name now\n" in refused.stderr
