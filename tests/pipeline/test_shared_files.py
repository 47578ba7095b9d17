"""Files of the same bytes are stored once, damage does not spread, and what nobody uses is collected."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from shardmill.pipeline.cache import entry
from shardmill.pipeline.cache.gc import collect
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action

WEIGHTS, OTHER = b"w" * entry.LEAST, b"o" * entry.LEAST


def work(name: str, content: bytes, made: Mapping[str, Path]) -> None:
    """A package: a graph of its own, and weights."""
    made["package"].mkdir()
    (made["package"] / "graph").write_text(name)
    (made["package"] / "weight.bin").write_bytes(content)


def make(store: Store, builds: Path, name: str, content: bytes = WEIGHTS) -> Path:
    """An artifact with its receipt in a build, as a job leaves it."""
    target = builds / "tiny" / f"{name}.mlpackage"
    receipt = target.with_name(f"{name}.receipt.json")
    store.perform(Action("convert", {"part": name}), {"package": target}, receipt, partial(work, name, content))
    return target


def test_two_packages_share_one_weight_file(tmp_path: Path) -> None:
    store = Store(tmp_path / ".store")
    one, two, other = (make(store, tmp_path, *given) for given in (("a",), ("b",), ("c", OTHER)))
    assert (one / "weight.bin").samefile(two / "weight.bin")
    assert not (one / "weight.bin").samefile(other / "weight.bin")
    assert not (one / "graph").samefile(two / "graph")
    assert (two / "graph").read_text() == "b"


def test_a_damaged_shared_file_is_not_handed_on(tmp_path: Path) -> None:
    store = Store(tmp_path / ".store")
    make(store, tmp_path, "a")
    (kept,) = (tmp_path / ".store" / entry.FOLDER).iterdir()
    kept.chmod(0o644)
    kept.write_bytes(OTHER)  # through the link, in the entry of "a" too
    assert (make(store, tmp_path, "b") / "weight.bin").read_bytes() == WEIGHTS
    assert (make(store, tmp_path, "c") / "weight.bin").read_bytes() == WEIGHTS


def test_a_file_system_without_hard_links_keeps_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    store = Store(tmp_path / ".store")
    one, two = make(store, tmp_path, "a"), make(store, tmp_path, "b")
    assert (one / "weight.bin").read_bytes() == (two / "weight.bin").read_bytes() == WEIGHTS


def test_what_nobody_uses_any_more_is_collected(tmp_path: Path) -> None:
    """A shared file goes with the last that has it, not before, and counts once."""
    store = Store(tmp_path / ".store")
    targets = [make(store, tmp_path, name) for name in "ab"]
    for target, left, freed in zip(targets, (1, 0), (0, len(WEIGHTS)), strict=True):
        target.with_name(f"{target.stem}.receipt.json").unlink()
        for file in target.iterdir():
            file.unlink()
        assert collect(tmp_path, dry=True).bytes >= freed
        found = collect(tmp_path)
        assert found.entries == 1 and found.bytes >= freed
        assert len(list((tmp_path / ".store" / entry.FOLDER).iterdir())) == left
