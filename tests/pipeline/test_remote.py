"""The remote store: what one machine made another takes, checked to the last byte, and it never fails a build."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from patience import PATIENCE
from stored import Made, Outcome, entry, never, write_both

from shardmill.files import dumps, parse_json, sealed
from shardmill.pipeline.cache import remote
from shardmill.pipeline.cache.remote import Remote
from shardmill.pipeline.cache.store import Store

from .bucket import bucket

DATA = hashlib.sha256(b"\x00\x01").hexdigest()  # of the folder's file


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket() as url:
        yield url


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty remote store's."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/remote"


@pytest.fixture
def folder(tmp_path: Path) -> Remote:
    """A remote store that is a folder."""
    return Remote(f"file://{tmp_path}/remote")


def machine(root: Path, shared: Remote) -> tuple[Store, Outcome]:
    """A machine that has made nothing yet."""
    return Store(root / "store", shared=shared), Outcome(root / "out")


def stored(shared: Remote) -> dict[str, bytes]:
    """All that lies in a remote store."""
    fs, root = fsspec.core.url_to_fs(shared.url)
    fs.invalidate_cache()
    found = fs.find(root) if fs.exists(root) else []
    return {path.removeprefix(root).lstrip("/"): fs.cat_file(path) for path in found}


def test_what_one_machine_made_another_takes(url: str, tmp_path: Path) -> None:
    shared = Remote(url)
    mine, here = machine(tmp_path / "a", shared)
    theirs, there = machine(tmp_path / "b", shared)
    assert here.perform(mine) is True
    assert there.perform(theirs, never) is False
    assert there.hashes() == here.hashes()
    assert there.receipt.read_bytes() == here.receipt.read_bytes()
    assert there.perform(Store(tmp_path / "b/store"), never) is False  # it is in that machine's own store by now
    file, key = entry(mine) / "file.json", entry(mine).name
    assert stored(shared).keys() == {
        f"v1/entries/{key}.json",
        f"v1/files/{DATA}",
        f"v1/files/{hashlib.sha256(file.read_bytes()).hexdigest()}",
    }


def test_what_nobody_made_is_work(url: str, tmp_path: Path) -> None:
    mine, here = machine(tmp_path / "a", Remote(url))
    assert here.perform(mine, params={"n": 1}) is True
    assert here.perform(mine, params={"n": 2}) is True


def changed(content: bytes, **changes: Any) -> bytes:
    """A manifest that says something else, sealed as it should be."""
    return dumps(sealed(parse_json(content) | changes)).encode()


def files(content: bytes, **more: str | None) -> bytes:
    """A manifest with other files."""
    listed = parse_json(content)["files"] | more
    return changed(content, files={name: sha256 for name, sha256 in listed.items() if sha256})


MANIFESTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda text: text[:40], "is damaged"),
    "empty": (lambda text: b"", "is damaged"),
    "nested": (lambda text: b"[" * 100_000, "is damaged"),
    "edited": (lambda text: text.replace(b"0", b"1", 1), "is damaged"),
    "a list": (lambda text: b"[]", "is damaged"),
    "no sha256": (lambda text: files(text, **{"file.json": "../../etc/passwd"}), "is damaged"),
    "another's": (lambda text: changed(text, key="0" * 64), "is of another entry"),
    "a file more": (lambda text: files(text, **{"more.json": DATA}), "more.json is no output of this step"),
    "a way out": (lambda text: files(text, **{"folder.mlpackage/../../x": DATA}), "is no output of this step"),
    "the root": (lambda text: files(text, **{"/x": DATA}), "/x is no output of this step"),
    "a name that none can have": (
        lambda text: files(text, **{f"folder.mlpackage/{'x' * 256}": DATA}),
        "is no output of this step",
    ),
    "a name that ends early": (
        lambda text: files(text, **{"folder.mlpackage/a\0b": DATA}),
        "is no output of this step",
    ),
    "a path that none can have": (
        lambda text: files(text, **{f"folder.mlpackage/{'x/' * 600}y": DATA}),
        "is no output of this step",
    ),
    "a file that is a folder": (
        lambda text: files(text, **{"folder.mlpackage/deep/data.bin/more": DATA}),
        "more is in a folder that is a file, too",
    ),
    "a folder that is a file": (
        lambda text: files(text, **{"folder.mlpackage": DATA}),
        "data.bin is in a folder that is a file, too",
    ),
    "a size that is none": (lambda text: changed(text, sizes={DATA: -1}), "is damaged"),
    "a size less": (lambda text: changed(text, sizes={}), "is damaged"),
    "an output less": (lambda text: files(text, **{"file.json": None}), "file.json is not in it"),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_manifest_that_is_not_what_it_should_be_is_refused(
    damage: str, folder: Remote, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, here = machine(tmp_path / "a", folder)
    here.perform(mine)
    manifest = tmp_path / f"remote/v1/entries/{entry(mine).name}.json"
    change, reason = MANIFESTS[damage]
    manifest.write_bytes(change(manifest.read_bytes()))
    refused_and_healed(folder, tmp_path, caplog, entry(mine).name, reason)
    assert not (tmp_path / "x").exists()


def refused_and_healed(shared: Remote, tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, reason: str) -> None:
    """A second machine does the work and puts the entry right, for a third one."""
    theirs, there = machine(tmp_path / "b", shared)
    caplog.clear()
    assert there.perform(theirs) is True
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"remote store: entry {key[:12]} refused: ") and reason in warning
    third, outcome = machine(tmp_path / "c", shared)
    assert outcome.perform(third, never) is False
    assert outcome.hashes() == there.hashes()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x00\x02", "data.bin is "),
        (b"\x00", "data.bin is "),
        (b"", "data.bin is "),
        (bytes(1 << 16), "data.bin has more than the 2 bytes that are listed"),
        (None, "data.bin is gone"),
    ],
    ids=["changed", "truncated", "empty", "longer", "gone"],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(
    content: bytes | None, told: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Remote(url)
    mine, here = machine(tmp_path / "a", shared)
    here.perform(mine)
    fs, root = fsspec.core.url_to_fs(url)
    if content is None:
        fs.rm_file(f"{root}/v1/files/{DATA}")
    else:
        fs.pipe_file(f"{root}/v1/files/{DATA}", content)
    refused_and_healed(shared, tmp_path, caplog, entry(mine).name, told)


def test_after_a_file_that_is_gone_the_rest_is_not_fetched(
    folder: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry may have hundreds of files, and gigabytes."""
    fs = fsspec.filesystem("file")
    fetched: list[str] = []
    ended = threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def get(self: object, source: str, target: str, **_: object) -> None:
        fetched.append(source)
        if source.endswith("0" * 64):
            raise FileNotFoundError(source)
        assert ended.wait(PATIENCE)
        Path(target).write_bytes(b"")

    def end(pool: ThreadPoolExecutor, **how: bool) -> None:
        shutdown(pool, **how | {"wait": False})
        ended.set()
        shutdown(pool)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)

    monkeypatch.setattr(type(fs), "get_file", get)
    monkeypatch.setattr(type(fs), "size", lambda self, source: 0)
    monkeypatch.setattr(remote, "hash_file", lambda path: f"{int(path.name):064}")
    files = {f"folder.mlpackage/{i}": remote.Listed(f"{i:064}", 0) for i in range(100)}
    with pytest.raises(remote.RemoteRefusal, match="0 is gone"):
        remote.bring(folder, files, {"folder": tmp_path / "folder.mlpackage"}, tmp_path)
    assert len(fetched) <= remote.AT_A_TIME + 1


def test_a_store_that_sends_more_than_it_lists_fills_no_disk(url: str, tmp_path: Path) -> None:
    """It is stopped at the size that the entry has of a file, and the hash is not waited for."""
    shared = Remote(url)
    mine, here = machine(tmp_path / "a", shared)
    here.perform(mine)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/v1/files/{DATA}", bytes(1 << 16))
    listed = remote.find_entry(shared, entry(mine).name)
    assert listed is not None and listed["folder.mlpackage/deep/data.bin"] == remote.Listed(DATA, 2)
    with pytest.raises(remote.RemoteRefusal, match="data.bin has more than the 2 bytes that are listed"):
        remote.bring(shared, listed, {name: tmp_path / name for name in ("folder.mlpackage", "file.json")}, tmp_path)


def test_a_list_without_end_is_not_read(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Remote(url)
    mine, here = machine(tmp_path / "a", shared)
    here.perform(mine)
    monkeypatch.setattr(remote, "ENTRY_BYTES", 100)
    with pytest.raises(remote.RemoteRefusal, match="longer than any list of files"):
        remote.find_entry(shared, entry(mine).name)


def test_an_entry_of_before_has_no_sizes_and_is_taken(folder: Remote, tmp_path: Path) -> None:
    mine, here = machine(tmp_path / "a", folder)
    here.perform(mine)
    manifest = tmp_path / f"remote/v1/entries/{entry(mine).name}.json"
    content = parse_json(manifest.read_bytes())
    manifest.write_text(dumps(sealed({"key": content["key"], "files": content["files"]})))
    theirs, there = machine(tmp_path / "b", folder)
    assert there.perform(theirs, never) is False


def test_a_refused_entry_leaves_nothing_behind(folder: Remote, tmp_path: Path) -> None:
    mine, here = machine(tmp_path / "a", folder)
    here.perform(mine)
    (tmp_path / "remote/v1/files" / DATA).write_bytes(b"")
    theirs, there = machine(tmp_path / "b", folder)
    with pytest.raises(AssertionError, match="this is work"):
        there.perform(theirs, never)
    assert not list((tmp_path / "b/store").glob("tmp-*"))
    assert there.names() == set()


def test_only_who_may_write_sends(folder: Remote, tmp_path: Path) -> None:
    reader, here = machine(tmp_path / "a", Remote(folder.url, writable=False))
    assert here.perform(reader) is True
    assert stored(folder) == {}


def test_a_store_that_takes_nothing_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "remote").write_text("in the way")
    mine, here = machine(tmp_path / "a", Remote(f"file://{tmp_path}/remote/store"))
    assert here.perform(mine) is True
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"remote store: entry {entry(mine).name[:12]} ") and "\n" not in warning


def test_a_bucket_that_is_not_there_costs_one_line(s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, here = machine(tmp_path / "a", Remote("s3://nobodys/store"))
    assert here.perform(mine) is True
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "was not sent" in warning and "bucket" in warning.lower()


def test_an_entry_appears_only_with_all_its_files(
    folder: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whenever sending breaks off, nobody finds the entry."""
    write = remote._write

    def breaking(fs: Any, path: str, content: Any) -> None:
        if path.endswith(DATA):
            raise ConnectionError("gone")
        write(fs, path, content)

    monkeypatch.setattr(remote, "_write", breaking)
    mine, here = machine(tmp_path / "a", folder)
    assert here.perform(mine) is True
    assert [path for path in stored(folder) if path.startswith("v1/entries")] == []
    assert "was not sent: gone" in caplog.text


def test_a_folder_never_shows_half_a_file(folder: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copyfile

    def half(source: Path, target: Path) -> None:
        copy(source, target)
        if "remote" in Path(target).parts:
            os.truncate(target, 1)
            assert [path for path in stored(folder) if "/." not in path] == []
            raise OSError("the machine went away")

    monkeypatch.setattr(remote.shutil, "copyfile", half)  # type: ignore[attr-defined]
    mine, here = machine(tmp_path / "a", folder)
    assert here.perform(mine) is True
    assert stored(folder) == {}


def test_half_a_file_is_sent_anew(folder: Remote, tmp_path: Path) -> None:
    (tmp_path / "remote/v1/files").mkdir(parents=True)
    (tmp_path / "remote/v1/files" / DATA).write_bytes(b"\x00")
    mine, here = machine(tmp_path / "a", folder)
    here.perform(mine)
    theirs, there = machine(tmp_path / "b", folder)
    assert there.perform(theirs, never) is False


def test_what_is_here_is_not_taken_from_there(folder: Remote, tmp_path: Path) -> None:
    """A bundle has its package's weights: one copy comes, as there is one here."""

    def large(made: Made) -> None:
        write_both(made)
        (made["folder"] / "weights").write_bytes(bytes(1 << 16))

    mine, here = machine(tmp_path / "a", folder)
    here.perform(mine, large, params={"n": 1})
    here.perform(mine, large, params={"n": 2})
    theirs, there = machine(tmp_path / "b", folder)
    there.perform(theirs, never, params={"n": 1})
    (tmp_path / "remote/v1/files" / hashlib.sha256(bytes(1 << 16)).hexdigest()).unlink()
    assert there.perform(theirs, never, params={"n": 2}) is False
    assert entry(theirs, params={"n": 1}).joinpath("folder.mlpackage/weights").stat().st_nlink == 4  # pool, build


def test_what_rots_here_is_taken_from_there(folder: Remote, tmp_path: Path) -> None:
    """Also where the shared file of the pool is what rotted."""
    mine, here = machine(tmp_path / "a", folder)

    def large(made: Made) -> None:
        write_both(made)
        (made["folder"] / "weights").write_bytes(bytes(1 << 16))

    here.perform(mine, large)
    weights = entry(mine) / "folder.mlpackage/weights"
    weights.chmod(0o644)
    weights.write_bytes(b"rotten" + bytes(1 << 16))
    assert here.perform(mine, never) is False
    assert (here.outputs["folder"] / "weights").read_bytes() == bytes(1 << 16)
