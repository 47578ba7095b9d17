"""The commands whose code is the lab's: where it is missing they say so, and what would bring it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardmill import cli


@pytest.mark.parametrize("command", ["rotate", "synth-checkpoint", "draft train"])
def test_without_the_lab_it_is_refused_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text("{}")
    (tmp_path / "plan.json").write_text(json.dumps({"buckets": []}))
    (tmp_path / "text.txt").write_text("A text.")
    words = {
        "rotate": ("rotate", str(tmp_path / "source"), str(tmp_path / "new")),
        "synth-checkpoint": ("synth-checkpoint", str(tmp_path / "new"), "--like", "configs/demo.yaml"),
        "draft train": ("draft", "train", str(tmp_path), "--text", str(tmp_path / "text.txt")),
    }
    for name in [name for name in sys.modules if name.startswith("shardmill_lab.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "shardmill_lab", None)
    monkeypatch.setattr("sys.argv", ["shardmill", *words[command]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and len(said) == 1
    assert said[0].startswith("shardmill: this command needs shardmill_lab") and "pip install -c" in said[0]
    assert not (tmp_path / "new").exists()
