"""The drawing of the pipeline: every step with its state, none left out, whatever the number of artifacts."""

from __future__ import annotations

import re
from pathlib import Path

from report import sample
from shardmill.config import Convert
from shardmill.report.dag import drawings, edges, places
from shardmill.report.stages import Step, steps

RULES = Path(__file__).parents[2] / "rules"
NAMES = {"manifest": "model.json", "parity_stack": "parity"}  # rules that go by another name in the drawing


def test_every_rule_of_the_workflow_is_drawn() -> None:
    """A step that is added to the rules must appear here, or the drawing lies."""
    text = "\n".join(file.read_text() for file in RULES.glob("*.smk"))
    written = re.findall(r"^rule (\w+):", text, re.MULTILINE)
    written += re.findall(r"""sm\.alike\(MODELS, "(\w+)"\)""", text)  # a rule for each set of parts
    rules = {NAMES.get(name, name) for name in written}
    assert rules == set(places(sample.pipeline())) == set(steps(sample.build()))
    assert {name for edge in edges(sample.pipeline()) for name in edge} == rules


def test_steps_that_a_build_has_no_use_for_are_not_drawn() -> None:
    plain = set(places(sample.pipeline(Convert())))
    assert set(places(sample.pipeline())) - plain == {"calibration", "codes", "sensitivity", "search"}
    assert {"precision", "convert"} <= plain


def test_steps_come_after_those_that_they_read_from_and_no_box_lies_on_another() -> None:
    where = places(sample.pipeline())
    assert all(where[first].rank < where[second].rank for first, second in edges(sample.pipeline()))
    assert len(set(where.values())) == len(where)
    assert all(abs(a.lane - b.lane) >= 1 for a in where.values() for b in where.values() if a.rank == b.rank and a != b)


def test_no_edge_is_drawn_that_goes_without_saying() -> None:
    """Conversion reads the checkpoint, but comes after the plan, which does so too."""
    found = edges(sample.pipeline())
    assert ("precision", "convert") in found and ("fetch", "convert") not in found
    assert ("model.json", "report") not in found and ("benchmark", "report") in found


def test_states_are_those_of_the_files() -> None:
    found = {name: step.state for name, step in steps(sample.build()).items()}
    assert found["parity"] == "passed" and found["residency"] == "predicted"
    assert found["compile"] == "unverified" and found["benchmark"] == "measured"
    assert found["provenance"] == "apart" and found["convert"] == "made"


def test_one_failed_part_fails_its_step_only() -> None:
    file = sample.residency("head_0")
    file["gate"][0] |= {"value": 3, "passed": False}
    found = steps(sample.build(residency=(sample.residency("layers_00_02"), file)))
    assert found["residency"].state == "failed" and found["parity"].state == "passed"
    assert found["residency"].artifacts == (("layers_00_02", "predicted"), ("head_0", "failed"))


def test_a_gate_file_that_is_not_there_is_missing() -> None:
    assert steps(sample.build(residency=()))["residency"].state == "missing"


def test_artifacts_without_room_are_counted() -> None:
    many = Step("fetch", "40 files", tuple((f"file_{i}", "made") for i in range(40)))
    wide, narrow = drawings(steps(sample.build()) | {"fetch": many}, sample.pipeline()).split("</svg>")[:2]
    for drawing in (wide, narrow):
        (more,) = re.findall(r">\+(\d+)<", drawing)
        assert drawing.count("<title>file_") + int(more) == 40
