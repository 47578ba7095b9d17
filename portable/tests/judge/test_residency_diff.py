"""Predicted and measured residency reports, compared row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.judge.lint import diff_residency, read_report


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


@pytest.mark.parametrize("statuses", [("ane", "ineligible", "ane"), ("ineligible", "ane", "unknown")])
def test_of_several_shapes_the_first_that_is_not_eligible_counts(statuses: tuple[str, ...]) -> None:
    """An operation that leaves the engine at one width only has left it."""
    measured = [{"output": "a", "shape": f"T={i}", "status": status} for i, status in enumerate(statuses)]
    for predicted, expected in (("eligible", [("eligible", "ineligible")]), ("ineligible", [])):
        found = diff_residency([{"output": "a", "status": predicted}], measured)
        assert [(d.predicted, d.measured) for d in found] == expected


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"rows": 1}', '{"rows": [1]}', '{"rows": [{}]}', '{"rows": [{"output": []}]}', '"rows"'],
)
def test_another_file_is_not_a_report(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ProgramError, match=r"report\.json is not a residency report"):
        read_report(tmp_path / "report.json", "predicted")


def test_a_report_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    """Comparing a prediction with a prediction would prove nothing."""
    (tmp_path / "report.json").write_text('{"evidence": "predicted", "rows": []}')
    assert read_report(tmp_path / "report.json", "predicted") == []
    with pytest.raises(ProgramError, match="holds predicted rows, not measured ones"):
        read_report(tmp_path / "report.json", "measured")
