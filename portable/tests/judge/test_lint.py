"""Lint rows of a sound package and of its bundle."""

from __future__ import annotations

from pathlib import Path

from portable_coreml.files.bundle import compile_model
from portable_coreml.judge.lint import lint
from portable_coreml.judge.placement import judge_package


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
