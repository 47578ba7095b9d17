"""What a command is told to read may be a device, a pipe, or JSON without end: it says so in one line, at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from reciter import failure, reciting

from shardmill.machine import is_portable

DEEP = "[" * 100_000
READS: dict[str, list[object]] = {  # BUILD and FILE stand for a build and for what is no file
    "lint": ["lint", "FILE"],
    "inspect": ["inspect", "FILE"],
    "diff-residency": ["diff-residency", "FILE", "FILE"],
    "plan": ["plan", "FILE"],
    "synth-checkpoint": ["synth-checkpoint", "new", "--like", "FILE"],
    "a prompt": ["generate", "BUILD", "--prompt-file", "FILE"],
    "a text to label": ["label", "BUILD", "--file", "FILE"],
    "a text to audit": ["audit-range", "BUILD", "--prompts", "FILE"],
    "a chat template": ["chat", "BUILD", "--chat-template", "FILE"],
    "a key to sign with": ["sign", "BUILD", "--key", "FILE"],
}


@pytest.fixture(autouse=True)
def _impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that waits fails."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError("still waiting")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(PATIENCE))  # what waits for a pipe's writer waits forever
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("file", ["/dev/zero", "fifo"])
@pytest.mark.parametrize("what", READS)
def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, file: str) -> None:
    if READS[what][0] == "audit-range" and not is_portable():
        pytest.skip("audit-range looks inside the portable engine, and refuses before it reads")
    build = reciting(tmp_path / "build", monkeypatch)
    os.mkfifo("fifo")
    names: dict[object, object] = {"BUILD": build, "FILE": file}
    line = failure(*(names.get(word, word) for word in READS[what]))
    assert line.startswith(file) and "not a regular file" in line, line


def test_json_without_end_is_damaged_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose file it is decides what to do about it; none is an unexpected error."""
    build = reciting(tmp_path / "build", monkeypatch)
    checkpoint, config = tmp_path / "checkpoint", tmp_path / "c.yaml"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(DEEP)
    (tmp_path / "recipe.json").write_text(DEEP)
    config.write_text("model: m\nsource: {path: checkpoint}\ncontext: 128\n")
    assert "config.json: not JSON: nested too deeply" in failure("plan", config)
    assert "config.json: not JSON: nested too deeply" in failure("synth-checkpoint", "new", "--like", config)
    assert "nested too deeply" in failure("diff-residency", checkpoint / "config.json", checkpoint / "config.json")
    (build / "source/tokenizer_config.json").write_text(DEEP)
    assert "tokenizer_config.json is damaged: nested too deeply" in failure("chat", build)
    (build / "model.json").write_text(DEEP)
    for command in (["generate", build, "--prompt", "a"], ["verify", build], ["chat", build]):
        assert "model.json is damaged: nested too deeply" in failure(*command)


def test_so_is_what_jobs_read(tmp_path: Path) -> None:
    """A plan, a part, a template, a recipe: the one that made it is told to make it again, or it is made."""
    from shardmill.convert.cache import read_program
    from shardmill.errors import ConfigError, UnreadableError
    from shardmill.files import load_json
    from shardmill.forms.recipe import recipe
    from shardmill.pipeline.code_digest import fetched_model_type
    from shardmill.pipeline.resources import Need, declared, known_sizes
    from shardmill.plan import load_part

    for name in ("plan.json", "part.json", "template.json", "recipe.json"):
        (tmp_path / name).write_text(DEEP)
    with pytest.raises(UnreadableError, match="nested too deeply"):
        load_part(tmp_path / "part.json")
    assert read_program(tmp_path / "template.json") is None
    with pytest.raises(ConfigError, match="nested too deeply"):
        recipe(str(tmp_path / "recipe.json"))
    (tmp_path / "sizes.json").write_text(DEEP)
    known = known_sizes(tmp_path, 1, lambda: load_json(tmp_path / "sizes.json"))
    need = declared(known, "convert", Need(1, part=1.0), None)
    with pytest.raises(FileNotFoundError, match="no plan yet"):
        need({"part": "head_0"}, ["input"])  # type: ignore[operator]
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(DEEP)
    assert fetched_model_type(tmp_path / "source.receipt.json") == ""
