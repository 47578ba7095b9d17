"""What the drafter `learned` has learned outlives the server, if a person wants that."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafted_decoding import DecodeError, LearnedDrafter
from drafted_decoding.drafters.follow import Numbering

from shardmill.serve.engine_worker import Worker
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Settings

from .fake import fake_model
from .running import running

REQUEST = {"model": "fake", "prompt": "Once", "max_tokens": 40, "temperature": 0}


def passes(settings: Settings, drafter: str) -> int:
    """Engine passes that one request takes."""
    with running(fake_model(), settings) as server:
        asked = {**REQUEST, "shardmill": {"drafter": drafter, "figures": True}}
        return len(server.post(asked)[1]["shardmill"]["accepted"])


def test_a_table_is_written_at_the_end_and_read_at_the_start(tmp_path: Path) -> None:
    """`learned` fills it, and has the use of it in a server of another day."""
    settings = Settings(port=0, policy="always", draft_table=tmp_path / "table.npz")
    first = passes(settings, "learned")
    assert passes(settings, "learned") < first
    assert [file.name for file in tmp_path.iterdir()] == ["table.npz"]


def test_another_model_s_table_is_refused_and_kept(tmp_path: Path) -> None:
    """At the start, by name: it would make every request fail, or be overwritten at the end."""
    file = tmp_path / "table.npz"
    LearnedDrafter().save(file, Numbering(257, "another"))
    before = file.read_bytes()
    with pytest.raises(DecodeError, match=r"table\.npz: this draft table was learned from a model with another token"):
        Worker(fake_model(), Metrics(), queue=1, draft_table=file)
    assert file.read_bytes() == before


def test_nothing_is_written_unless_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert passes(Settings(port=0, policy="always"), "learned") == passes(Settings(port=0, policy="always"), "learned")
    assert not list(tmp_path.iterdir())


def test_a_damaged_table_and_an_unknown_policy_are_told_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "table.npz"
    file.write_text("no table")
    with pytest.raises(DecodeError, match=r"table\.npz is no saved draft table"):
        Worker(fake_model(), Metrics(), queue=1, draft_table=file)
    with pytest.raises(DecodeError, match="no draft policy is called 'often'"):
        Worker(fake_model(), Metrics(), queue=1, policy="often")
