"""Where kits and evidence are written, what lay there stays, and texts of strangers stay texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.device.kit import write_kit
from shardmill.device.recording import import_result
from shardmill.errors import ShardmillError
from shardmill.files import sealed, write_json
from shardmill.runtime import warm

runner = CliRunner()


def test_a_kit_takes_the_place_of_no_folder(build: Path, tmp_path: Path) -> None:
    (tmp_path / "kits").mkdir()
    (tmp_path / "kits/thesis.txt").write_text("precious")
    said = runner.invoke(app, ["device", "kit", str(build), "-o", str(tmp_path / "kits")])
    assert said.exit_code == 1 and said.stderr == f"shardmill: {tmp_path}/kits: is a folder; name the file to write\n"
    assert (tmp_path / "kits/thesis.txt").read_text() == "precious"


def test_a_place_that_can_t_be_written_to_is_told(build: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = runner.invoke(app, ["device", "kit", str(build), "-o", str(tmp_path / "file/kit.zip")])
    assert said.exit_code == 1 and said.stderr.count("\n") == 1 and "unexpected" not in said.stderr


def test_two_variants_of_one_name_are_refused(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a build's folder is called as another build is in a shorter context."""
    other = Path(shutil.copytree(build, tmp_path / f"{build.name}@16"))
    variants = {build: [{"name": build.name}, {"name": f"{build.name}@16"}], other: [{"name": other.name}]}
    monkeypatch.setattr("shardmill.device.kit._variants", lambda name, build, *_: variants[build])
    with pytest.raises(ShardmillError, match=f"two of the variants are called {other.name}: rename the folder"):
        write_kit([build, other], tmp_path / "kit.zip")


def test_evidence_is_written_to_all_builds_or_to_none(measured_kit: Path, build: Path, tmp_path: Path) -> None:
    one, two = (Path(shutil.copytree(build, tmp_path / name)) for name in ("one", "two"))
    (two / "evidence").write_text("in the way")
    with pytest.raises(ShardmillError, match=r"two/evidence: is not a folder, so it can't hold evidence; remove it"):
        import_result(measured_kit / "result.json", [one, two])
    assert not (one / "evidence").exists()


@pytest.mark.parametrize("text", ["\x1b[2J\x1b]0;owned\x07", "[/red]", "[bold]x"])
def test_a_table_shows_texts_as_they_are(measured_kit: Path, build: Path, tmp_path: Path, text: str) -> None:
    """No escapes for the terminal, and no markup of the library that draws it."""
    content = json.loads((measured_kit / "result.json").read_text())
    for variant in content["variants"].values():
        variant["described"]["precision"] = text
        variant["measurements"][f"{text}/x"] = {"status": "refused", "value": {}, "timing": {}, "detail": text}
    own = Path(shutil.copytree(build, tmp_path / "own"))
    write_json(tmp_path / "result.json", sealed(content))
    import_result(tmp_path / "result.json", [own])
    said = runner.invoke(app, ["device", "rank", str(own)], env={"COLUMNS": "200"})
    assert said.exit_code == 0 and "\x1b" not in said.stdout and "\x07" not in said.stdout
    assert text.startswith("\x1b") or text in said.stdout


def test_what_is_warm_is_warm_without_a_note(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache/shardmill/warm.json").mkdir(parents=True)  # where the note would be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = list(warm.warm_programs(build, "fp16"))
    assert found and all(one.seconds is not None for one in found)
    assert "can't be written" in caplog.text and "the next run can't compare its times" in caplog.text


def test_two_builds_of_one_name_are_told_apart(measured_kit: Path, build: Path, tmp_path: Path) -> None:
    content = json.loads((measured_kit / "result.json").read_text())
    write_json(tmp_path / "result.json", sealed(content | {"engine": {"name": "coreml"}}))
    both = [Path(shutil.copytree(build, tmp_path / name / "model")) for name in ("one", "two")]
    import_result(tmp_path / "result.json", both)
    said = runner.invoke(app, ["device", "rank", *map(str, both)], env={"COLUMNS": "400"})
    assert said.exit_code == 0 and all(str(path) in said.stdout for path in both), said.stdout


def test_a_damaged_build_is_left_out_and_told(
    measured_kit: Path, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = runner.invoke(app, ["device", "import", str(measured_kit / "result.json")])
    assert said.exit_code == 1 and "there is no finished build here; name the build that was measured" in said.stderr
    shutil.copytree(build, tmp_path / "build/sound")
    (tmp_path / "build/broken").mkdir()
    (tmp_path / "build/broken/model.json").write_text("{")
    said = runner.invoke(app, ["device", "import", str(measured_kit / "result.json")])
    assert said.exit_code == 0 and "build/sound/evidence/" in said.stdout
    assert said.stderr.startswith("left out: build/broken/model.json") and said.stderr.count("\n") == 1
