"""What devices answered about limits: what it changes for plans, rules and keys in the folder where it lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from device.test_questions import answered
from portable_coreml.judge import limits as table
from portable_coreml.judge.limits import SCORES, limits, strictest
from portable_coreml.judge.rules import RULES
from typer.testing import CliRunner

from shardmill import config, weight_files
from shardmill.cli import app
from shardmill.device.questions import questions
from shardmill.errors import ShardmillError
from shardmill.evidence.folder import LIMITS, heed_limits
from shardmill.evidence.limits import Answer, answers_of, limits_of
from shardmill.files import sealed, write_json
from shardmill.pipeline import options
from shardmill.pipeline.steps import split as splitting

GIB = 1 << 30
STEP = GIB // 100
SOURCE = {"source": {"repo": "a/b", "revision": "0" * 40}}
M5 = "M5, macOS 27.0.1 (26A1)"
runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder; the tables count again afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    table.heed(())


def imported(folder: Path, *results: dict[str, Any]) -> list[str]:
    """What imports say of limits."""
    said = list[str]()
    for result in results:
        write_json(folder / "result.json", sealed(result))
        done = runner.invoke(app, ["device", "import", str(folder / "result.json")])
        assert done.exit_code == 0, done.output
        said += [line for line in done.output.splitlines() if line.startswith(LIMITS)]
    return said


WEIGHTS: dict[str, tuple[str, list[int], list[int], tuple[int, str] | None]] = {
    "both sides of one party's limit": ("macOS 27", [GIB - STEP], [GIB + STEP], (GIB, "B")),
    "one side of it": ("macOS 27", [GIB - STEP], [], None),
    "more than one party says": (
        "macOS 27",
        [GIB - STEP, GIB + STEP, 2 * GIB - STEP],
        [2 * GIB + STEP],
        (2 * GIB, "C"),
    ),
    "more, up to no known limit": ("macOS 27", [GIB + STEP], [2 * GIB - STEP], (GIB + STEP, "C")),
    "less than one party says": ("macOS 27", [], [GIB - STEP], (GIB - STEP - 1, "C")),
    "less than several say": ("macOS 26", [GIB - STEP], [GIB + STEP], (GIB, "D")),
    "more than several say": ("macOS 26", [2 * GIB + STEP], [], (2 * GIB, "D")),
    "both sides of what several say": ("macOS 26", [2 * GIB - STEP], [2 * GIB + STEP], None),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_an_answer_moves_a_limit_and_its_confidence(case: str) -> None:
    system, takes, fails, wanted = WEIGHTS[case]
    found = limits_of([Answer("weights", system, M5, takes, fails)])
    assert [(one.most, one.confidence) for one in found] == ([wanted] if wanted else [])
    for one in found:
        assert one.systems == (system,) and one.sources[-1] == f"measured on {M5}" and len(one.sources) > 1


def test_a_machine_that_fails_counts_against_one_that_does_not() -> None:
    other = Answer("weights", "macOS 27", "M2", [], [GIB - STEP])
    (found,) = limits_of([Answer("weights", "macOS 27", M5, [GIB - STEP, GIB + STEP], []), other])
    assert found.most < GIB - STEP


def test_scores_that_are_wrong_are_a_limit() -> None:
    (asked,) = (one for one in questions() if one["name"] == "scores")
    content = answered("27.0.1")
    value = {"evidence": "measured", "of": 2, "placed": 2}
    lines = {
        f"questions/scores/probe#{i}": {"status": status, "value": value, "timing": {"ms": 1.0}, "detail": ""}
        for i, status in enumerate(("wrong", "ok", "wrong", "ok", "ok"))
    }
    lines["questions/scores/probe#4"]["value"] = {**value, "placed": 1}  # type: ignore[dict-item]
    on_the_cpu = {"name": "5 x 1", "kind": "scores", "queries": 5, "keys": 1}
    content["questions"] = {"asked": [asked | {"probes": [*asked["probes"], on_the_cpu]}], "measurements": lines}
    (answer,) = answers_of(content)
    assert len(answer.takes) == len(answer.fails) == 2 and max(answer.takes) < min(answer.fails)
    (found,) = limits_of([answer])
    assert (found.most, found.rule, found.confidence) == (SCORES[0].most, "S9", "B")


def test_an_import_changes_what_plans_and_rules_say(folder: Path) -> None:
    """With the machine named; the stricter systems of a config still count."""
    said = imported(folder, answered("27.0.1", 2, 2, 0, 2))
    assert said == [
        f"{LIMITS}: macOS 27 takes {2 * GIB} bytes of weights (rule W1, confidence C, measured on {M5}); "
        "`plan`, `lint` and builds in this folder go by it"
    ]
    heed_limits()
    assert limits("macOS 27").weight_bytes.most == 2 * GIB and limits("iOS 27").weight_bytes.most == GIB
    of_macos = config.parse(tiny.settings("", **SOURCE, program={"runs_on": ["macOS 15", "macOS 27"]}))
    assert weight_files.weight_limit(of_macos).most == 2 * GIB
    assert weight_files.weight_limit(config.parse(tiny.settings("", **SOURCE))).most == GIB
    subject: Any = type("Subject", (), {})()
    subject.weight_bytes = 2 * GIB + 1
    subject.target = type("Target", (), {"systems": ("macOS 27",), "named": ("macOS 27",)})()
    (breach,) = RULES["W1"].check(subject)
    assert f"(confidence C: measured on {M5})" in breach.why


def test_another_answer_of_the_same_machine_replaces_the_first(folder: Path) -> None:
    first, second = imported(folder, answered("27.0.1", 2, 2, 0, 2), answered("27.0.1", 0, 2, 0, 0))
    assert f"{2 * GIB} bytes" in first and f"{GIB} bytes of weights (rule W1, confidence B" in second
    assert imported(folder, answered("27.0.1", 0, 2, 0, 0)) == []
    heed_limits()
    assert strictest(["macOS 27"]).weight_bytes.confidence == "B"


@pytest.mark.parametrize("how", ["another engine", "another system"])
def test_only_core_ml_on_a_known_system_answers(how: str, folder: Path) -> None:
    content = answered("30.0" if how == "another system" else "27.0.1", 2, 2, 0, 0)
    content["engine"] = {"name": "coreml" if how == "another system" else "portable_coreml"}
    assert imported(folder, content) == [] and not (folder / LIMITS).exists()


def test_a_changed_file_is_refused_in_one_line(folder: Path) -> None:
    imported(folder, answered("27.0.1", 2, 2, 0, 2))
    (folder / LIMITS).write_text((folder / LIMITS).read_text().replace("27", "26", 1))
    with pytest.raises(
        ShardmillError, match="device-limits.json: not as `shardmill device import` wrote it; remove it"
    ):
        heed_limits()


def test_plans_and_verdicts_depend_on_the_answers_for_their_systems(folder: Path) -> None:
    """And on nothing where there are none, so that keys are what they were."""
    both, old = (
        config.parse(tiny.settings("", **SOURCE, program={"runs_on": [first, last]}))
        for first, last in (("macOS 26", "macOS 27"), ("macOS 15", "macOS 26"))
    )
    write_json(folder / "record.json", {"files": {}})

    def split(one: Any) -> str:
        how: Any = {"limits": options.device_limits(one), "hashes": None, "tools": {}}
        action = splitting.task(folder / "record.json", [], options.split_settings(one), **how).action
        assert action is not None
        return action.key

    before = [split(both), split(old)]
    assert options.device_limits(both) == []
    imported(folder, answered("27.0.1", 2, 2, 0, 2))
    heed_limits()
    assert [split(both) == before[0], split(old) == before[1]] == [False, True]
    assert json.loads(json.dumps(options.device_limits(both))) == options.device_limits(both) != []
