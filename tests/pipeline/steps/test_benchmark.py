"""A speed is measured when something that it depends on is new, and only then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmill import machine
from shardmill.bench import speed
from shardmill.files import write_json
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import perform
from shardmill.pipeline.steps import benchmark

SETTINGS = {"new_tokens": 8}
MODEL = {"model": "tiny", "parts": [{"program": {"files": {"a": "0"}}}], "source": {"repo": None, "commit": "local"}}


PORTABLE = {"name": "portable"}


class Build:
    """A finished model's folder; counts measurements."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.measured, self.settings = folder, 0, dict[str, Any](SETTINGS)
        patch.setattr(speed, "benchmark", self.measure)
        self.write(MODEL)
        (folder / "tasks/copying").mkdir(parents=True)
        (folder / "tasks/copying/1.txt").write_text("copy this")
        (folder / "code.txt").write_text("def")

    def write(self, model: dict[str, Any]) -> None:
        write_json(self.folder / "model.json", model)

    def measure(self, build: Path, settings: Any) -> dict[str, int]:
        assert (build, settings.new_tokens) == (self.folder, self.settings["new_tokens"])
        self.measured += 1
        return {"measurement": self.measured}

    def run(self) -> int:
        """The number of the measurement that speed.json holds."""
        text, tasks = self.folder / "code.txt", [self.folder / "tasks/copying/1.txt"]
        speed, receipt = self.folder / "benchmark/speed.json", self.folder / "benchmark/speed.receipt.json"
        task = benchmark.task(self.folder / "model.json", text, tasks, self.settings, PORTABLE, {})
        perform(task, {"speed": speed}, receipt, Store(self.folder / ".store"))
        found: int = json.loads(speed.read_text())["measurement"]
        return found


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    return Build(tmp_path, monkeypatch)


def test_what_was_measured_stands_while_only_the_source_is_another(build: Build) -> None:
    """A new commit that brings the same tensors gives the same programs."""
    assert (build.run(), build.run()) == (1, 1)
    texts = {"path": "source", "files": {"README.md": "1"}}
    build.write(MODEL | {"source": {"repo": "owner/name", "commit": "0" * 40}, "texts": texts})
    assert (build.run(), build.measured) == (1, 1)


def other_program(build: Build, patch: pytest.MonkeyPatch) -> None:
    build.write(MODEL | {"parts": [{"program": {"files": {"a": "1"}}}]})


def other_text(build: Build, patch: pytest.MonkeyPatch) -> None:
    (build.folder / "code.txt").write_text("class")


def other_task(build: Build, patch: pytest.MonkeyPatch) -> None:
    (build.folder / "tasks/copying/1.txt").write_text("copy that")


def other_settings(build: Build, patch: pytest.MonkeyPatch) -> None:
    build.settings["new_tokens"] = 9


def other_machine(build: Build, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "machine", lambda: {"cores": 1000})


@pytest.mark.parametrize("change", [other_program, other_text, other_task, other_settings, other_machine])
def test_whatever_a_speed_depends_on_is_measured_anew(
    change: Callable[[Build, pytest.MonkeyPatch], None], build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.run()
    change(build, monkeypatch)
    assert (build.run(), build.run()) == (2, 2)
