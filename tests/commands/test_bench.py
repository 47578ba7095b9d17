"""`shardmill bench` leaves a build that its records describe, and finds out first where it can't write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pipeline import made
from typer.testing import CliRunner
from unprivileged import unprivileged

from shardmill import cli
from shardmill.release.bundle import assemble

MEASURED = {"figures": "of a quick machine"}


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished build, which takes no time to measure."""
    monkeypatch.setattr("shardmill.bench.speed.benchmark", lambda *_, **__: MEASURED)
    return made.finish(tmp_path / "builds")


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    return done.exit_code, done.output


def without_benchmark(build: Path) -> None:
    """What `benchmark: false` in a config leaves out."""
    for name in ("benchmark/speed.json", "benchmark/speed.receipt.json", "report.html", "report.receipt.json"):
        (build / name).unlink()


def published(build: Path) -> None:
    """What publishing adds."""
    assemble(build, "both")


@pytest.mark.parametrize("change", [without_benchmark, published])
def test_a_build_stays_what_its_records_say(build: Path, change: Any) -> None:
    """Of a config without a benchmark no record names the figures; a published build can't be drawn again."""
    change(build)
    code, said = run("bench", build, "--json")
    assert code == 0, said
    code, said = run("verify", build)
    assert code == 0, said
    assert (build.parent / "tiny.speed.json").read_text() == '{\n "figures": "of a quick machine"\n}\n'


def test_figures_of_the_pipeline_are_replaced(build: Path) -> None:
    assert run("bench", build, "--json")[0] == 0
    assert "quick machine" in (build / "benchmark/speed.json").read_text()


@pytest.mark.parametrize("words", [("bench", "BUILD"), ("device", "kit", "BUILD"), ("witness", "BUILD")])
def test_a_place_that_can_t_be_written_is_refused_before_the_work(
    build: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where a folder would have to be: what no permission of root's can overcome."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("has begun")

    monkeypatch.setattr("shardmill.bench.speed.benchmark", fail)
    monkeypatch.setattr("shardmill.device.kit.write_kit", fail)
    monkeypatch.setattr("shardmill.commands.quality._verdict", fail)
    monkeypatch.setattr("shardmill.witness.installed.runtime", dict)
    (build.parent / "file").touch()
    place = build.parent / "file/figures"
    code, said = run(*(str(build) if word == "BUILD" else word for word in words), "--output", place)
    assert (code, said) == (
        1,
        f"shardmill: {place}: can't be written (File exists); name another file with --output\n",
    )


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    file = tmp_path / "closed/speed.json"
    file.parent.mkdir(mode=0o555)
    code = (
        "import sys, pathlib; from shardmill.commands.arguments import check_output as c; c(pathlib.Path(sys.argv[1]))"
    )
    command = [*unprivileged(), sys.executable, "-c", code, str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"{file}: can't be written (Permission denied); name another file with --output\n" in said.stderr
    assert list(file.parent.iterdir()) == []
