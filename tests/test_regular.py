"""Only regular files are read, and no reader of a file that somebody names goes another way."""

from __future__ import annotations

import os
import re
from pathlib import Path

import drafted_decoding
import kit_runner
import pytest
from drafted_decoding import DecodeError
from drafted_decoding.drafters.follow import FollowTable, Numbering, load_table

import shardmill
from shardmill import files
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import CheckpointError, ShardmillError
from shardmill.runtime.engine import read_tables

PACKAGES = [Path(package.__file__).parent for package in (drafted_decoding, kit_runner, shardmill)]
# Each JSON that is parsed without files.py, with the reason.
OTHER_JSON = {
    "files.py": "it is the one place",
    "drafted_decoding/drafters/learned.py": "a file of the package, which uses nothing of shardmill",
    "drafted_decoding/constraint.py": "likewise; a tokenizer that the grammar library has read",
    "serve/call_texts.py": "a model's answer, with line breaks in its strings; it catches what goes too deep itself",
    "kit_runner/kit.py": "a kit runs without shardmill; it catches what goes too deep itself",
    "kit_runner/child.py": "likewise; it reads what its own parent wrote",
}


def test_a_regular_file_is_read_as_pathlib_does(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for raw in (b"", b"a\r\nb\rc\n\xc3\xa9", b"x" * 100_000):
        path.write_bytes(raw)
        assert files.read_bytes(path) == raw and files.read_text(path) == path.read_text(encoding="utf-8")
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        files.read_text(path)


def test_all_else_is_refused_at_once(tmp_path: Path) -> None:
    """By the name that was given, and without a descriptor left behind."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    before = len(os.listdir("/dev/fd"))
    for path, why in (
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
        (tmp_path / "link", "not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "absent", "No such file or directory"),
        (tmp_path / ("long" * 1000), "File name too long"),
    ):
        with pytest.raises(OSError, match=re.escape(why)) as caught:
            files.read_bytes(path)
        assert caught.value.filename in (path, str(path)) and caught.value.strerror == why
        with pytest.raises(OSError, match=re.escape(why)):
            files.check(path)
    assert len(os.listdir("/dev/fd")) == before


def test_a_draft_table_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DecodeError, match="not a regular file"):
        load_table(tmp_path / "fifo", FollowTable([]), Numbering(4, ""))


def test_files_for_libraries_are_regular_ones(tmp_path: Path) -> None:
    """A library waits at a pipe, and reads a device until memory ends."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_tokenizer(tmp_path / "fifo")
    with pytest.raises(ShardmillError, match="not a regular file"):
        read_tables(tmp_path / "fifo")


def test_json_is_parsed_in_one_place() -> None:
    """`json.loads` of a hundred thousand brackets is a RecursionError, which nobody expects."""
    found = {
        file.relative_to(package if package.name == "shardmill" else package.parent).as_posix()
        for package in PACKAGES
        for file in package.rglob("*.py")
        if re.search(r"\bjson\.loads?\(", file.read_text(encoding="utf-8"))
    }
    assert found == set(OTHER_JSON)
