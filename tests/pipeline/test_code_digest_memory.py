"""What is remembered of source files is what parsing them gives, and never what they held before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline import code_digest
from shardmill.pipeline.code_digest import read_module, save_modules

PARSED = code_digest.parse_module


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of one module and one other file, nothing of which is remembered."""
    folder = tmp_path / "shardmill"
    folder.mkdir()
    (folder / "__init__.py").write_text("x = 1\n")
    (folder / "page.html").write_text("<p>")
    monkeypatch.setattr(code_digest, "OURS", {"shardmill": tmp_path})
    monkeypatch.setattr(code_digest, "KEPT", tmp_path / "kept.json")
    forget()
    yield folder
    forget()


def forget() -> None:
    """As another process begins."""
    code_digest._new.clear()
    code_digest._kept.cache_clear()
    read_module.cache_clear()


def again(file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[code_digest.Module, list[Path]]:
    """A file as another process reads it, and what that one parsed."""
    forget()
    read: list[Path] = []

    def counted(file: Path, *given: Any) -> code_digest.Module:
        read.append(file)
        return PARSED(file, *given)

    monkeypatch.setattr(code_digest, "parse_module", counted)
    found = read_module(file)
    save_modules()
    return found, read


def test_another_process_does_not_parse_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = package / "near.py"
    file.write_text("from shardmill.far import add as plus\nimport shardmill.other\nraise ValueError('no')\n")
    first, read = again(file, monkeypatch)
    assert read == [file] and first.imported == ("shardmill.far.add", "shardmill.other")
    assert again(file, monkeypatch) == (first, [])


@pytest.mark.parametrize("changed", ["__init__.py", "page.html"])
def test_other_bytes_are_read_though_the_file_system_says_nothing_of_them(
    package: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    first, _ = again(package / "__init__.py", monkeypatch)
    file = package / changed
    before, text = file.stat(), file.read_text()
    file.write_text(text.replace(text[0], "y", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second, read = again(package / "__init__.py", monkeypatch)
    assert second.code != first.code and read == [package / "__init__.py"]
    file.write_text(text)
    assert again(package / "__init__.py", monkeypatch)[0] == first


DAMAGED: dict[str, Any] = {
    "nothing": "",
    "half a file": '{"reader": "',
    "a list": "[]",
    "what another reader made": {"reader": "0" * 64},
    "no modules": {"modules": None},
    "an entry of another form": {"modules": {"shardmill/__init__": {"code": "0" * 64}}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_memory_that_is_none_costs_time_only(package: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = package / "__init__.py"
    first, _ = again(file, monkeypatch)
    kept, content = json.loads(code_digest.KEPT.read_text()), DAMAGED[name]
    code_digest.KEPT.write_text(content if isinstance(content, str) else json.dumps(kept | content))
    assert again(file, monkeypatch) == (first, [file])
    assert again(file, monkeypatch) == (first, [])


def test_where_it_can_not_be_written_nothing_is_lost(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_digest, "KEPT", package / "page.html/kept.json")
    first, read = again(package / "__init__.py", monkeypatch)
    assert again(package / "__init__.py", monkeypatch) == (first, read)
