"""Faults of a lock: a build takes what was locked, or ends with one line, and nothing half-written is left."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint.hub_server import COMMIT, REPO, Hub

from shardmill import config
from shardmill.errors import ShardmillError
from shardmill.pipeline import locks

from .test_locks import CONTENT, LOCK, NEWER, YAML, default, fetched, hub

__all__ = ["hub"]  # a fixture
WEIGHTS = "model-00001-of-00002.safetensors"
Fault = Callable[[], object]


def edited(change: Callable[[dict[str, Any]], object]) -> Fault:
    """Another content of the lock's JSON."""

    def fault() -> None:
        content = json.loads(LOCK.read_text())
        change(content)
        LOCK.write_text(json.dumps(content))

    return fault


def entry(**changes: Any) -> Fault:
    """Another content of the lock's only entry."""
    return edited(lambda content: content["sources"][0].update(changes))


def file(name: str, **changes: Any) -> Fault:
    """Another content of what the lock says of a file."""
    return edited(lambda content: content["sources"][0]["files"][name].update(changes))


def text(change: Callable[[bytes], bytes]) -> Fault:
    """Other bytes of the lock."""
    return lambda: LOCK.write_bytes(change(LOCK.read_bytes()))


def in_its_place(make: Callable[[Path], object]) -> Fault:
    """Something that is no file in the lock's place."""

    def fault() -> None:
        LOCK.unlink()
        make(LOCK)

    return fault


def linked() -> None:
    """The lock lies elsewhere, and a link leads there."""
    LOCK.rename("shared.lock")
    LOCK.symlink_to(Path("../shared.lock"))


def conflict(content: bytes) -> bytes:
    """What Git leaves of two branches that have locked different commits."""
    line = f'   "commit": "{COMMIT}",\n'
    other = line.replace(COMMIT, NEWER)
    return content.decode().replace(line, f"<<<<<<< HEAD\n{line}=======\n{other}>>>>>>> theirs\n").encode()


RIGHT, DAMAGED, OTHERWISE = None, "damaged; take it back", "the hub and the lock disagree about this file"
FAULTS: dict[str, tuple[Fault, str | None]] = {
    "none": (lambda: None, RIGHT),
    "missing": (LOCK.unlink, RIGHT),
    "CRLF": (text(lambda content: content.replace(b"\n", b"\r\n")), RIGHT),
    "another layout": (edited(lambda _: None), RIGHT),
    "other keys beside": (entry(comment="mine"), RIGHT),
    "another repository's": (entry(repo="acme/other"), RIGHT),
    "a link to it": (linked, RIGHT),
    "a link to nothing": (in_its_place(lambda lock: lock.symlink_to("absent.lock")), RIGHT),
    "empty": (text(lambda _: b""), DAMAGED),
    **{
        f"cut off at {n} in 10": (text(lambda content, n=n: content[: len(content) * n // 10]), DAMAGED)
        for n in range(1, 10)
    },
    "two of them": (text(lambda content: content * 2), DAMAGED),
    "a byte order mark": (text(lambda content: b"\xef\xbb\xbf" + content), DAMAGED),
    "no text": (text(lambda _: b"\xff\xfe\x00"), DAMAGED),
    "nested deeply": (text(lambda _: b"[" * 100_000), DAMAGED),
    "a conflict of two branches": (text(conflict), DAMAGED),
    "a key twice": (text(lambda content: content.replace(b'"repo"', b'"repo": "acme/other", "repo"')), DAMAGED),
    "an entry twice": (
        edited(lambda content: content["sources"].append(content["sources"][0] | {"commit": NEWER})),
        DAMAGED,
    ),
    "a list": (text(lambda _: b"[]"), DAMAGED),
    "sources of a wrong type": (edited(lambda content: content.update(sources={"0": 1})), DAMAGED),
    "a size of a wrong type": (file(WEIGHTS, size="1"), DAMAGED),
    "a size that is a truth": (file(WEIGHTS, size=True), DAMAGED),
    "a digest of a wrong type": (file(WEIGHTS, digest=1), DAMAGED),
    "a branch for a commit": (entry(commit="main"), DAMAGED),
    "a commit in capitals": (entry(commit=COMMIT.upper()), DAMAGED),
    "a repository of a wrong type": (entry(repo=5), DAMAGED),
    "a size below nothing": (file(WEIGHTS, size=-1), DAMAGED),
    "another kind of digest": (file(WEIGHTS, digest="md5:0"), DAMAGED),
    "no files": (entry(files={}), DAMAGED),
    "no entry": (edited(lambda content: content.update(sources=[{}])), DAMAGED),
    "a version of a wrong type": (edited(lambda content: content.update(version=True)), "of another version"),
    "another version": (edited(lambda content: content.update(version=2)), "of another version of shardmill"),
    "another commit": (entry(commit="0" * 40), "has no revision"),
    "another digest": (file(WEIGHTS, digest="sha256:" + "0" * 64), f"{WEIGHTS}: {OTHERWISE}"),
    "another size": (file(WEIGHTS, size=5), f"{WEIGHTS}: {OTHERWISE}"),
    "a file less": (edited(lambda content: content["sources"][0]["files"].pop(WEIGHTS)), f"{WEIGHTS}: {OTHERWISE}"),
    "a file more": (
        edited(lambda content: content["sources"][0]["files"].update(x={"size": 1, "digest": f"git:{COMMIT}"})),
        f"x: {OTHERWISE}",
    ),
    "a file that climbs": (
        edited(lambda content: content["sources"][0]["files"].update({"../x": {"size": 1, "digest": f"git:{COMMIT}"}})),
        f"../x: {OTHERWISE}",
    ),
    "a folder": (in_its_place(Path.mkdir), "can't be read (Is a directory)"),
    "a pipe": (in_its_place(os.mkfifo), "can't be read (not a regular file)"),
    "a link to itself": (in_its_place(lambda lock: lock.symlink_to(lock.name)), "can't be read (Too many levels"),
}


def tree() -> dict[str, Any]:
    """All that lies in the working folder, but for the hub's cache: content of files, and what else there is."""

    def held(path: Path) -> Any:
        mode = path.lstat().st_mode
        return path.readlink() if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)

    return {str(path): held(path) for path in Path().rglob("*") if path.parts[0] != "hub"}


def build() -> None:
    """Lock and fetch, as a build begins."""
    found = locks.with_locks(config.parse(CONTENT), YAML, "tiny.yaml")
    locks.keep([found])
    fetched(found, Path())


@pytest.fixture
def locked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A lock of the hub's commit; the machine that takes it has nothing of the hub yet, which has a newer commit."""
    locks.keep([locks.with_locks(config.parse(CONTENT), YAML, "tiny.yaml")])
    default(monkeypatch, hub.endpoint, tmp_path / "hub" / "other")
    yield hub


@pytest.mark.thorough(
    but=[
        "none",
        "missing",
        "CRLF",
        "another layout",
        "other keys beside",
        "another repository's",
        "a link to it",
        "a link to nothing",
        "empty",
        "cut off at 1 in 10",
        "cut off at 5 in 10",
        "two of them",
        "a byte order mark",
        "no text",
        "nested deeply",
        "a conflict of two branches",
        "a key twice",
        "an entry twice",
        "a list",
        "sources of a wrong type",
        "a size of a wrong type",
        "a size that is a truth",
        "a digest of a wrong type",
        "a branch for a commit",
        "a commit in capitals",
        "a repository of a wrong type",
        "a size below nothing",
        "another kind of digest",
        "no files",
        "no entry",
        "a version of a wrong type",
        "another version",
        "another commit",
        "another digest",
        "another size",
        "a file less",
        "a file more",
        "a file that climbs",
        "a folder",
        "a pipe",
        "a link to itself",
    ]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_build_is_right_or_ends_with_one_line(locked: Hub, fault: str) -> None:
    spoil, said = FAULTS[fault]
    spoil()
    before = tree()
    if said is None:
        build()
        key = (REPO, locks.MAIN)
        assert locks.read_lock(LOCK)[key].commit == COMMIT
        assert {name: Path("source", name).read_bytes() for name in locked.files} == locked.files
        if fault != "another repository's":  # beside which the new entry is written
            assert {name: tree()[name] for name in before} == before
        return
    with pytest.raises(ShardmillError) as caught:
        build()
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert tree() == before


def full(path: Path, content: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def torn(path: Path, text: str, encoding: str) -> int:
    """Write half, and be interrupted."""
    with path.open("w") as half:
        half.write(text[: len(text) // 2])
    raise KeyboardInterrupt


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("fault", ["a full disk", "an interrupt"])
def test_a_lock_that_can_not_be_written_whole_is_not_written(
    locked: Hub, monkeypatch: pytest.MonkeyPatch, fault: str, held: bool
) -> None:
    """One that is there keeps its content, and loses nothing to what came beside."""
    entry(repo="acme/other")() if held else LOCK.unlink()
    before = tree()
    with monkeypatch.context() as patch:
        if fault == "a full disk":
            patch.setattr(locks, "write_json", full)
        else:
            patch.setattr(Path, "write_text", torn)
        with pytest.raises((ShardmillError, KeyboardInterrupt)) as caught:
            build()
    if fault == "a full disk":
        assert "can't be written (No space left on device); allow it, or write a commit as" in str(caught.value)
    assert tree() == before
    build()
    assert locks.read_lock(LOCK)[REPO, locks.MAIN].commit == COMMIT


def test_of_eight_runs_at_once_one_decides(hub: Hub) -> None:
    """All have asked the hub, which has two commits, before any wrote. The others take the same, or end with a line."""
    found = locks.with_locks(config.parse(CONTENT), YAML, "tiny.yaml")
    other = replace(found, source=replace(found.source, revision=NEWER))
    begin, ended = threading.Barrier(8), list[tuple[str, str]]()

    def run(mine: config.Config) -> None:
        begin.wait()
        said = ""
        try:
            locks.keep([mine])
        except ShardmillError as error:
            said = str(error)
        ended.append((str(mine.source.revision), said))

    runs = [threading.Thread(target=run, args=(mine,)) for mine in [found, other] * 4]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    kept = locks.read_lock(LOCK)[REPO, locks.MAIN].commit
    assert len(ended) == 8
    for commit, said in ended:
        assert ("another run has meanwhile locked" in said) == (commit != kept) and "\n" not in said
    assert {path.name for path in LOCK.parent.iterdir()} == {YAML.name, LOCK.name}


def test_an_upgrade_leaves_a_folder_of_its_name(locked: Hub) -> None:
    """Whatever somebody keeps in it."""
    LOCK.unlink()
    (LOCK / "mine").mkdir(parents=True)
    before = tree()
    with pytest.raises(ShardmillError, match="can't be written"):
        locks.relock(config.parse(CONTENT), YAML, upgrade=True)
    assert tree() == before
