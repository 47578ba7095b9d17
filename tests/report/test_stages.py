"""The list of the pipeline's steps: each with its state, none left out, whatever the number of artifacts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from report import sample
from report.reading import section
from shardmill.config import Convert
from shardmill.report.page import render
from shardmill.report.stages import step_states

RULES = Path(__file__).parents[2] / "rules"
NAMES = {"manifest": "model.json", "parity_stack": "parity"}  # rules that go by another name in the list


def names(pipeline: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in pipeline]


def test_every_rule_of_the_workflow_is_listed() -> None:
    """A step that is added to the rules must appear here, or the list lies."""
    text = "\n".join(file.read_text() for file in RULES.glob("*.smk"))
    written = re.findall(r"^rule (\w+):", text, re.MULTILINE)
    written += re.findall(r"""alike\(MODELS, "(\w+)"\)""", text)  # a rule for each set of parts
    rules = {NAMES.get(name, name) for name in written}
    assert rules == set(names(sample.pipeline())) == set(step_states(sample.build()))


def test_steps_that_a_build_has_no_use_for_are_not_listed() -> None:
    plain = set(names(sample.pipeline(Convert())))
    assert set(names(sample.pipeline())) - plain == {"calibration", "codes", "sensitivity", "search"}
    assert {"precision", "convert"} <= plain


def test_states_are_those_of_the_files() -> None:
    found = {name: step.state for name, step in step_states(sample.build()).items()}
    assert found["parity"] == "passed" and found["residency"] == "predicted"
    assert found["compile"] == "unverified" and found["benchmark"] == "measured"
    assert found["provenance"] == "apart" and found["convert"] == "made"


def test_one_failed_part_fails_its_step_only() -> None:
    file = sample.residency("head_0")
    file["gate"][0] |= {"value": 3, "passed": False}
    found = step_states(sample.build(residency=(sample.residency("layers_00_02"), file)))
    assert found["residency"].state == "failed" and found["parity"].state == "passed"
    assert found["residency"].artifacts == (("layers_00_02", "predicted"), ("head_0", "failed"))


def test_a_gate_file_that_is_not_there_is_missing() -> None:
    assert step_states(sample.build(residency=()))["residency"].state == "missing"


def test_the_worst_artifacts_of_a_step_are_named_on_the_page() -> None:
    file = sample.residency("head_0")
    file["gate"][0] |= {"value": 3, "passed": False}
    listed = section(render(sample.build(residency=(sample.residency("layers_00_02"), file))), "pipeline")
    assert "residency 2 gate files failed head_0" in listed and "convert" in listed
