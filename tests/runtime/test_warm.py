"""`shardmill warm`: every program at every width, with the time of its first load beside that of a later one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest
from typer.testing import CliRunner

from shardmill import machine
from shardmill.cli import app
from shardmill.errors import LoadError, ShardmillError
from shardmill.runtime import warm
from shardmill.runtime.bundles import on_program_load, report_load

NAMES = ("layers_00_02", "layers_02_04", "head_0")


class Programs:
    """Stands for loaded programs, and keeps what was run; one may fail."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []
        self.failing: tuple[str, BaseException] | None = None

    def load(self, path: Path, part: dict[str, Any], context: int) -> Any:
        name = path.stem
        if self.failing and self.failing[0] == name:
            raise self.failing[1]
        return Ran(name, self.ran, dict.fromkeys(map(int, part.get("contexts", ()))) | {context: None})


class Ran:
    """A loaded program."""

    def __init__(self, name: str, ran: list[tuple[str, int]], lengths: dict[int, None]) -> None:
        self.name, self.ran, self.lengths = name, ran, lengths if len(lengths) > 1 else {}

    def move(self, slots: int, keep: bool) -> None:
        if self.lengths:
            self.name = f"{self.name.split(' ')[0]} {slots}"

    def __call__(self, inputs: dict[str, Any]) -> None:
        self.ran.append((self.name, inputs["hidden"].shape[2]))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Programs:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Programs()
    monkeypatch.setattr(warm, "Program", found.load)
    return found


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A manifest of three programs, and their files' sizes."""
    folder = tmp_path / "build"
    content = manifest()
    (head,) = content["parts"]
    content["parts"] = [
        {**head, "name": name, "program": {"path": f"compiled/{name}.mlmodelc", "files": {"w": str(place) * 64}}}
        for place, name in enumerate(NAMES)
    ]
    for name in NAMES:
        (folder / f"compiled/{name}.mlmodelc").mkdir(parents=True)
        (folder / f"compiled/{name}.mlmodelc/w").write_bytes(b"w" * 1000)
    (folder / "model.json").write_text(json.dumps(content))
    return folder


def warmed(build: Path) -> list[str]:
    """The names of programs that were loaded for the first time now; all others were loaded again."""
    found = list(warm.warm_programs(build, "fp32"))
    assert [program.name for program in found] == list(NAMES)
    return [program.name for program in found if program.first is None]


def test_every_program_runs_once_at_every_width(build: Path, programs: Programs) -> None:
    assert warmed(build) == list(NAMES)
    assert programs.ran == [(name, width) for name in NAMES for width in (1, 4)]


def test_a_later_load_is_made_and_stands_beside_the_first(
    build: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the system has kept something shows in the time, and in nothing else."""
    clock = iter([0, 90, 100, 130, 200, 201, 300, 301, 400, 440, 500, 501])
    monkeypatch.setattr(warm.time, "perf_counter", lambda: next(clock))
    assert [(p.seconds, p.first) for p in warm.warm_programs(build, "fp32")] == [(90, None), (30, None), (1, None)]
    assert [(p.seconds, p.first) for p in warm.warm_programs(build, "fp32")] == [(1, 90), (40, 30), (1, 1)]
    assert len(programs.ran) == 2 * 2 * len(NAMES)


def test_the_first_time_is_the_first_of_all_runs(build: Path, programs: Programs) -> None:
    first = [program.seconds for program in warm.warm_programs(build, "fp32")]
    list(warm.warm_programs(build, "fp32"))
    assert [program.first for program in warm.warm_programs(build, "fp32")] == first


def test_stopped_it_knows_what_it_has_loaded(build: Path, programs: Programs) -> None:
    programs.failing = (NAMES[1], KeyboardInterrupt())
    stopped = CliRunner().invoke(app, ["warm", str(build)])
    assert stopped.exit_code == 130 and "shardmill: interrupted" in stopped.output
    assert f"[1/3] {NAMES[0]}: " in stopped.output and f"{NAMES[1]}: " not in stopped.output
    programs.failing = None
    again = CliRunner().invoke(app, ["warm", str(build)])
    assert again.exit_code == 0
    told = [line for line in again.output.splitlines() if line.startswith("[")]
    assert ["the first time" in line for line in told] == [True, False, False]
    assert [name for name, width in programs.ran if width == 1] == [NAMES[0], *NAMES]


def test_a_program_that_fails_is_the_only_one_that_is_new_next_time(build: Path, programs: Programs) -> None:
    programs.failing = (NAMES[2], LoadError("compiled/head_0.mlmodelc can't be loaded: no"))
    told = f"can't be loaded: no; `shardmill verify {build}` tells whether it is damaged"
    with pytest.raises(ShardmillError, match=told):
        warmed(build)
    programs.failing = None
    assert warmed(build) == [NAMES[2]]


def test_another_system_or_other_bytes_are_new(
    build: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(build)
    content = json.loads((build / "model.json").read_text())
    content["parts"][1]["program"]["files"]["w"] = "9" * 64
    (build / "model.json").write_text(json.dumps(content))
    assert warmed(build) == [NAMES[1]]
    monkeypatch.setattr(machine, "engine", lambda: {"name": "coreml", "build": "25C1"})
    assert warmed(build) == list(NAMES)


def test_a_damaged_note_costs_a_load_and_nothing_else(build: Path, programs: Programs, tmp_path: Path) -> None:
    warmed(build)
    (tmp_path / "cache/shardmill/warm.json").write_text("{")
    assert warmed(build) == list(NAMES)


def test_the_rest_is_estimated_by_bytes(build: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    (build / f"compiled/{NAMES[2]}.mlmodelc/w").write_bytes(b"w" * 4000)
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(warm.time, "perf_counter", lambda: next(clock))
    assert [(p.seconds, p.left) for p in warm.warm_programs(build, "fp32")] == [(10, 50.0), (10, 40.0), (10, 0.0)]


def test_only_who_listens_is_told() -> None:
    heard: list[str] = []
    report_load("nobody")
    with on_program_load(heard.append):
        report_load("a")
    report_load("b")
    assert heard == ["a"]


def test_every_length_of_a_context_is_run(programs: Programs, build: Path) -> None:
    """Or a text would wait in its middle for the functions of the next one."""
    content = json.loads((build / "model.json").read_text())
    content["contexts"] = [8]
    content["parts"][0]["contexts"] = {"8": {"functions": {"1": "c8_t1"}, "inputs": {}, "states": {}}}
    (build / "model.json").write_text(json.dumps(content))
    list(warm.warm_programs(build, "fp16"))
    lengths = [name for name, _ in programs.ran if name.startswith(NAMES[0])]
    assert [*dict.fromkeys(lengths)] == [f"{NAMES[0]} 8", f"{NAMES[0]} {content['context']}"]
