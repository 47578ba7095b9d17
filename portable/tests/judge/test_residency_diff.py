"""Predicted and measured residency reports, compared row by row."""

from __future__ import annotations

from portable_coreml.judge.residency_diff import diff_residency


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
