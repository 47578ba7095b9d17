"""The answers that a kit gives follow from its measurements, and from nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit_runner import probes, runner
from kit_runner.job import Refused
from kit_runner.kit import NOT_RUN, OK, Kit
from kit_runner.plan import MeasurementGroup, PlannedMeasurement, groups
from kit_runner.questions import answers, key, on_engine

SIZES: dict[str, Any] = {
    "name": "weights",
    "text": "What runs?",
    "compares": False,
    "probes": [{"name": name, "kind": "weights", "bytes": 1 << 20} for name in ("1 GiB", "2 GiB")],
}
PLANNED = "on the Neural Engine by its plan, but as slow as the CPU"
SPEED: dict[str, Any] = {
    "name": "deep",
    "text": "Is it faster?",
    "compares": True,
    "probes": [{"name": name, "kind": "deep", "group": 64} for name in ("whole", "in four")],
}


def line(status: str = OK, placed: int = 2, evidence: str = "measured", **timing: float) -> dict[str, Any]:
    value = {"evidence": evidence, "placed": placed, "of": 2, "error": 0.001}
    return {"status": status, "value": value if status == OK else {}, "timing": {"ms": 1.0, **timing}, "detail": ""}


def said(question: dict[str, Any], *lines: dict[str, Any]) -> str:
    (found,) = answers([question], {key(question["name"], i): one for i, one in enumerate(lines)})
    return found.removeprefix(question["text"]).strip()


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (line(), "on the Neural Engine: 1 GiB, 2 GiB"),
        (line(placed=1), "on the Neural Engine: 1 GiB; right, but not all on the Neural Engine: 2 GiB"),
        (
            line(ms_cpu=1.1),
            "on the Neural Engine: 1 GiB; on the Neural Engine by its plan, but as slow as the CPU: 2 GiB",
        ),
        (line(ms_cpu=1.3), "on the Neural Engine: 1 GiB, 2 GiB"),
        (line("wrong"), "on the Neural Engine: 1 GiB; wrong: 2 GiB"),
        (line("crashed"), "on the Neural Engine: 1 GiB; no result: 2 GiB"),
        (line(NOT_RUN), "on the Neural Engine: 1 GiB; not run: 2 GiB"),
        (line(evidence="predicted"), "on the Neural Engine: 1 GiB; right here, without a Neural Engine: 2 GiB"),
    ],
)
def test_each_fate_has_its_words(second: dict[str, Any], expected: str) -> None:
    assert said(SIZES, line(), second) == expected


def test_what_was_not_begun_is_not_run() -> None:
    assert said(SIZES) == "not run: 1 GiB, 2 GiB"


def test_a_plan_alone_is_not_believed() -> None:
    """macOS 27 is reported to run large programs on the CPU without a word."""
    assert on_engine(line(ms_cpu=2.0)) and not on_engine(line(ms_cpu=1.0)) and not on_engine(line("wrong"))


def test_speed_is_compared_within_a_group() -> None:
    found = said(SPEED, line(ms=3.0), line(ms=1.5))
    assert found == "whole 3 ms; in four 1.5 ms, 2.00 times as fast"
    assert said(SPEED, line("refused"), line(ms=1.5)) == "whole: refused; in four 1.5 ms"


def test_probes_come_before_builds_each_in_a_process_of_its_own() -> None:
    kit = Kit(Path(), "", {"questions": [SIZES, SPEED], "variants": []})
    assert [[m.key for m in group.measurements] for group in groups(kit)] == [
        ["questions/weights/probe#0"],
        ["questions/weights/probe#1"],
        ["questions/deep/probe#0"],
        ["questions/deep/probe#1"],
    ]
    assert len(groups(kit, only=["probe"])) == 4


def test_after_twenty_minutes_no_probe_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds are measured all the same, and another run asks the remaining questions."""
    kit = Kit(Path(), "", {"questions": [SIZES], "variants": []})
    build = MeasurementGroup("a", "head_0", (PlannedMeasurement("a/head_0/compile", (), 1),))
    clock, asked, added = iter([0.0, 1.0, *2 * [runner.SECONDS + 1]]), list[str](), list[Any]()
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(runner, "_finish", lambda run, group: asked.append(group.measurements[0].key))
    monkeypatch.setattr(runner, "_add", lambda run, record: added.append(record))
    results = SimpleNamespace(records={}, status=lambda key: "")
    runner.measure(SimpleNamespace(results=results, groups=[*groups(kit), build]))  # type: ignore[arg-type]
    assert asked == ["questions/weights/probe#0", "a/head_0/compile"]
    assert [(one["key"], one["status"]) for one in added] == [("questions/weights/probe#1", NOT_RUN)]


def test_a_program_that_has_no_room_is_not_built(tmp_path: Path) -> None:
    probes.check_room(1 << 20, tmp_path)
    with pytest.raises(Refused, match="GiB of memory; there are"):
        probes.check_room(1 << 50, tmp_path)


@pytest.mark.parametrize("size", [2 * 64 * 64 * 3, 2 * 64 * 64 * 3 + 2 * 64 * 5])
def test_a_program_has_the_bytes_that_were_asked_for(size: int) -> None:
    """The last matrix has the rest of the rows, and no two matrices are equal."""
    made = probes.MAKERS["weights"]({"bytes": size, "width": 64})
    stored = list[Any]()
    mb = SimpleNamespace(conv=lambda x, weight: stored.append(weight) or x)
    made.function(mb, None)
    assert sum(weight.nbytes for weight in stored) == size
    assert not np.array_equal(stored[0], stored[1])
