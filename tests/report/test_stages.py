"""The list of the pipeline's steps: each with its state, none left out, whatever the number of artifacts."""

from __future__ import annotations

from typing import Any

from report import sample
from report.reading import section
from shardmill.config import Convert
from shardmill.pipeline.needs import STEPS
from shardmill.report.page import render
from shardmill.report.stages import AMOUNTS, SHOWN, step_states


def names(pipeline: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in pipeline]


def test_every_step_of_the_workflow_is_listed() -> None:
    """In the list's own order, which has words for each."""
    assert set(names(sample.pipeline())) == STEPS.keys()
    shown = {SHOWN.get(name, name) for name in STEPS}
    assert shown == AMOUNTS.keys() and [*step_states(sample.build())] == [*AMOUNTS]


def test_a_step_that_the_list_has_no_words_for_comes_last() -> None:
    more = {"name": "listen", "gate": False, "files": ["listen.receipt.json"]}
    assert [*step_states(sample.build(pipeline=[more, *sample.pipeline()]))] == [*AMOUNTS, "listen"]


def test_parts_are_counted_in_the_plan_and_other_files_by_the_rules() -> None:
    """The programs and the table are parts; parity has a file for each program, and one for all."""
    amounts = {name: step.amount for name, step in step_states(sample.build()).items()}
    assert (amounts["split"], amounts["convert"], amounts["parity"]) == ("3 parts", "2 programs", "3 gate files")


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
