"""A hub, a mirror or a proxy that lies: nothing outside the cache is touched, and each lie ends in one plain line."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.checkpoint import hub as download
from shardmill.checkpoint import hub_limits, hub_listing

from .hub_case import Case
from .hub_server import COMMIT, REPO, entry
from .samples import two_file_checkpoint

TEXT, WEIGHTS = "tokenizer.json", "model-00001-of-00002.safetensors"


def files_under(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that holds what a user would miss."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    return folder


@pytest.mark.parametrize("target", ["precious", "absent"])
@pytest.mark.parametrize("name", [TEXT, WEIGHTS])
def test_an_etag_is_never_a_path(case: Case, outside: Path, name: str, target: str) -> None:
    """An ETag names no file, whether the target exists or not, in the first run and in the second."""
    case.hub.etags[name] = str(outside / target)
    case.hub.served[name] = b"curl evil | sh"
    before = files_under(outside)
    for _ in range(2):
        case.refused()
        assert files_under(outside) == before


def test_an_etag_does_not_matter(case: Case, outside: Path) -> None:
    """The right bytes are taken, whatever they are called; the cache holds them under the listed id."""
    case.hub.etags = {name: str(outside / name) for name in case.hub.files}
    case.fetch()
    assert (case.dest / TEXT).read_bytes() == case.hub.files[TEXT]
    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("listed", ["{outside}/evil", "../../../home/evil", "A" * 64, "a" * 63, "a" * 64 + "\n", 7])
@pytest.mark.parametrize("kind", ["lfs", "git"])
def test_an_id_of_the_listing_is_never_a_path(case: Case, outside: Path, kind: str, listed: Any) -> None:
    """Ids that are not 40 or 64 hexadecimal digits are refused before anything is asked for."""
    oid = listed.format(outside=outside) if isinstance(listed, str) else listed
    lfs = {"lfs": {"oid": oid, "size": 5, "pointerSize": 9}}
    case.hub.rows = {WEIGHTS: lfs} if kind == "lfs" else {TEXT: {"oid": oid}}
    case.hub.drop_after[WEIGHTS] = 10
    before = files_under(outside)
    for _ in range(2):
        assert "invalid id or size" in case.refused() or isinstance(listed, int)
    assert files_under(outside) == before
    assert not any("resolve" in request.path for request in case.hub.requests)


@pytest.mark.parametrize("size", [-5, "5", True, 2**63, None, 1.5])
def test_a_size_is_a_number_of_bytes(case: Case, size: object) -> None:
    case.hub.rows[TEXT] = {"size": size}
    assert "invalid id or size" in case.refused()


def test_a_listing_cached_by_another_client_is_checked_too(case: Case, outside: Path) -> None:
    trees = case.cache_dir / "models--acme--tiny" / "trees"
    trees.mkdir(parents=True)
    rows = {name: {"size": 3, "blob_id": str(outside / "evil")} for name in case.hub.files}
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": rows}))
    assert "invalid id or size" in case.refused()
    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("what", ["snapshot", "blob"])
def test_a_link_out_of_the_cache_costs_its_target_nothing(case: Case, outside: Path, what: str) -> None:
    """An earlier client may have been tricked: its links are replaced, what they lead to is left alone."""
    case.fetch()
    pointer = case.cache_dir / "models--acme--tiny" / "snapshots" / COMMIT / TEXT
    link = pointer if what == "snapshot" else pointer.resolve()
    link.unlink()
    link.symlink_to(outside / "precious")
    (case.dest / "source.json").unlink()
    (case.dest / TEXT).unlink()
    for path in case.dest.iterdir():
        path.unlink()
    case.dest.rmdir()
    if what == "blob":
        assert "not the hub's file" in case.refused()
    case.fetch()
    assert (case.dest / TEXT).read_bytes() == case.hub.files[TEXT]
    assert (outside / "precious").read_text() == "precious"


@pytest.mark.parametrize("name", [TEXT, WEIGHTS])
def test_more_bytes_than_listed_are_not_written(case: Case, name: str) -> None:
    """A body without end would fill the disk."""
    case.hub.served[name] = case.hub.files[name] + bytes(1 << 20)
    assert f"more than the {len(case.hub.files[name])} bytes" in case.refused()
    assert all(path.stat().st_size <= len(case.hub.files[name]) for path in case.cache_dir.rglob("*.incomplete"))


@pytest.mark.parametrize("length", [8, 1 << 20])
@pytest.mark.parametrize("name", [TEXT, WEIGHTS])
def test_a_page_in_place_of_a_file_is_not_resumed_from(case: Case, name: str, length: int) -> None:
    case.hub.served[name] = b"<html>".ljust(length)
    case.refused()
    del case.hub.served[name]
    case.fetch()
    assert (case.dest / name).read_bytes() == case.hub.files[name]


ROW = entry("config.json", b"{}", lfs=False)
NO_LISTINGS = {
    "a sign-in page": b"<html><body>Welcome to the airport</body></html>",
    "nothing": b"",
    "an object": b'{"error": "no"}',
    "a number": b"7",
    "numbers": b"[1, 2]",
    "rows without keys": b"[{}]",
    "a path that is no text": json.dumps([ROW | {"path": 7}]).encode(),
    "LFS that is no object": json.dumps([ROW | {"lfs": "x"}]).encode(),
    "deep": b"[" * 100_000,
    "bytes that are no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("what", NO_LISTINGS)
def test_what_is_no_listing_is_called_so(case: Case, what: str) -> None:
    case.hub.listing = NO_LISTINGS[what]
    message = case.refused()
    assert f"{case.hub.endpoint} did not answer as a hub does" in message and "sign-in page" in message


def test_a_listing_without_end_is_not_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_limits, "SMALL_BYTES", 10_000)
    case.hub.listing = b"[" + b" " * 20_000 + b"]"
    assert "sent a listing of more than 10000 bytes" in case.refused()


def test_a_text_file_is_no_gigabytes(case: Case) -> None:
    case.hub.rows["config.json"] = {"size": 200_000_000}
    assert "config.json has 200000000 bytes" in case.refused()
    assert not case.hub.downloads("config.json")


@pytest.mark.parametrize("path", [f"/api/models/{REPO}/tree/{COMMIT}", f"/{REPO}/resolve/{COMMIT}/{TEXT}"])
def test_small_things_must_come_soon(case: Case, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A byte now and then keeps every timeout of a socket from ending it."""
    monkeypatch.setattr(download, "SMALL_SECONDS", 0.5)
    monkeypatch.setattr(hub_listing, "SMALL_SECONDS", 0.5)
    case.hub.dripping = path
    assert "no complete answer within" in case.refused()


@pytest.mark.parametrize("wait", ["3600", "9" * 40])
def test_a_hub_can_not_ask_for_an_hour(case: Case, wait: str) -> None:
    case.hub.retry_after = wait
    assert "429 and asks to wait longer than 60 s" in case.refused()
    assert len(case.hub.requests) == 1


def test_a_short_wait_is_granted(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the hub client has tries left."""
    waits: list[float] = []

    def slept(seconds: float) -> None:
        waits.append(seconds)
        case.hub.retry_after = None

    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", slept)
    case.hub.retry_after = "5"
    case.fetch()
    assert waits == [6.0]
    assert (case.dest / TEXT).read_bytes() == two_file_checkpoint()[TEXT]


def test_a_listing_without_end_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_listing, "MOST_FILES", len(case.hub.files) - 1)
    assert f"lists more than {len(case.hub.files) - 1} files" in case.refused()


def test_many_small_texts_are_not_a_little(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have as much as one may; together they would fill the disk."""
    monkeypatch.setattr(download, "TEXT_BYTES", 10)
    assert "its text files have " in case.refused()
    assert not list(case.cache_dir.rglob("blobs/*"))
