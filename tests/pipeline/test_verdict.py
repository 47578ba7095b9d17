"""A verdict that missed is kept where Snakemake leaves it, and only then is the step an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.errors import GateError
from shardmill.gates.measurement import Measurement, compare
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import perform
from shardmill.pipeline.task import Action, Task
from shardmill.pipeline.verdict import failed, write_verdict


def content(kl: float) -> dict[str, object]:
    return {"part": "stack", "gate": compare([Measurement("kl", kl), Measurement("psnr", 50.0)])}


def judge(folder: Path, kl: float) -> Path:
    """Lets a gate's job say so; the verdict's path."""
    verdict = folder / "stack.json"
    task = Task(
        lambda made: write_verdict("parity stack", content(kl), made["verdict"]),
        Action("parity_stack", {"package": "a"}),
    )
    perform(task, {"verdict": verdict}, folder / "stack.receipt.json", Store(folder / "store"))
    return verdict


def test_a_verdict_that_passed_is_the_output(tmp_path: Path) -> None:
    failed(tmp_path / "stack.json").write_text("an older one")
    verdict = judge(tmp_path, 0.001)
    assert json.loads(verdict.read_text()) == content(0.001)
    assert not failed(verdict).exists()


@pytest.mark.parametrize(("kl", "written"), [(0.5, 0.5), (float("nan"), "nan")])
def test_one_that_missed_lies_beside_it_with_every_number(tmp_path: Path, kl: float, written: object) -> None:
    """NaN has no spelling in JSON, and the numbers of a gate that met one are what a person needs."""
    verdict = tmp_path / "stack.json"
    with pytest.raises(GateError, match=r"parity stack: kl is (0.5|nan), must be <= 0.02; .*stack.failed.json"):
        judge(tmp_path, kl)
    assert not verdict.exists()
    assert not (tmp_path / "stack.receipt.json").exists()
    kept = json.loads(failed(verdict).read_text())
    assert kept["missed"] == f"parity stack: kl is {written}, must be <= 0.02" and kept["inputs"] == {"package": "a"}
    rows = kept["gate"]
    assert [(row["name"], row["value"], row["passed"]) for row in rows] == [("kl", written, False), ("psnr", 50, True)]
