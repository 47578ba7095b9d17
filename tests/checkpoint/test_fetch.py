"""Fetching from a hub with the real client: what lands, what is recorded, and what every failure says."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import close_session
from patience import PATIENCE, wait_until
from processes import succeeded

from shardmill.checkpoint import cache, hashing, hub
from shardmill.checkpoint.headers import read_tensors
from shardmill.checkpoint.hub_limits import BoundedFile

from .hub_case import CHUNK, Case
from .hub_server import COMMIT, REPO, Hub, git_blob_id
from .samples import index_of, two_file_checkpoint


def test_hub_checkpoint_lands_linked_and_recorded(case: Case) -> None:
    """Exactly the checkpoint's files arrive, byte for byte, weights as links into the cache, and are recorded."""
    record = case.fetch()
    wanted = two_file_checkpoint()
    assert {p.name for p in case.dest.iterdir()} == {*wanted, "source.json"}
    assert {p.name: p.read_bytes() for p in case.dest.iterdir() if p.name != "source.json"} == wanted
    assert record["repo"] == REPO and record["commit"] == COMMIT
    assert record["files"].keys() == wanted.keys()
    weights = case.dest / "model-00001-of-00002.safetensors"
    blob = case.cache_dir / "models--acme--tiny" / "blobs" / record["files"][weights.name]["sha256"]
    assert weights.samefile(blob)
    assert len(read_tensors(case.dest)) == 3


def test_record_is_canonical(case: Case, tmp_path: Path) -> None:
    """source.json is the same text from another cache and into another folder, and names no path of the machine."""
    case.fetch()
    other = Case(tmp_path / "elsewhere", case.hub)
    other.fetch()
    text = (case.dest / "source.json").read_text()
    assert text == (other.dest / "source.json").read_text()
    assert str(tmp_path) not in text and json.loads(text)["commit"] == COMMIT


def written(path: Path) -> tuple[int, int]:
    """Which file it is, and when it was last written; reading it changes neither."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def test_second_fetch_needs_no_network_and_touches_nothing(case: Case) -> None:
    """A commit never changes: once it is in the cache, nobody is asked again, and the folder stays as it is."""
    case.fetch()
    before = written(case.dest / "source.json")
    case.hub.requests.clear()
    case.fetch()
    assert case.hub.requests == []
    assert written(case.dest / "source.json") == before


def test_dropped_connection_resumes(case: Case) -> None:
    """After a broken connection the client asks for the rest only: no byte that was written is sent again."""
    name = "model-00001-of-00002.safetensors"
    case.hub.drop_after[name] = 3 * CHUNK + 5
    case.fetch()
    first, second = case.hub.downloads(name)
    assert first.range is None and second.range == f"bytes={3 * CHUNK}-"
    assert second.sent == len(case.hub.files[name]) - 3 * CHUNK


WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


SLEEP = time.sleep  # which no retry does here


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files as they are read to be hashed, from now on."""
    reads: list[str] = []
    digest = hashing._digest_span
    monkeypatch.setattr(hashing, "_digest_span", lambda path, span: reads.append(path.name) or digest(path, span))
    return reads


def test_weights_are_hashed_while_they_are_written_and_not_read_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the connection broke off, or an earlier run left a part of a file."""
    case.hub.drop_after[WEIGHTS[0]] = 3 * CHUNK + 5
    blobs = case.cache_dir / "models--acme--tiny/blobs"
    blobs.mkdir(parents=True)
    body = case.hub.files[WEIGHTS[1]]
    (blobs / f"{sha256(body).hexdigest()}.shardmill.incomplete").write_bytes(body[:10])
    reads = counted_reads(monkeypatch)
    record = case.fetch()
    assert {name: record["files"][name]["sha256"] for name in WEIGHTS} == {
        name: sha256(case.hub.files[name]).hexdigest() for name in WEIGHTS
    }
    assert case.hub.downloads(WEIGHTS[1])[0].range == "bytes=10-"
    assert not {*reads} & {*WEIGHTS}


def test_what_was_hashed_while_it_was_written_is_remembered_once_it_has_settled(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after the fetch find the hashes of large files, for which it waits, and no others."""
    for module in (hub, cache):
        monkeypatch.setattr(module, "RACY_NS", 300_000_000)
    known = cache.HashCache(tmp_path / "hashes.sqlite")
    case.fetch(cache=known)
    reads = counted_reads(monkeypatch)
    weights = case.dest / WEIGHTS[0]
    hashing.hash_file(weights, known)
    assert reads == [WEIGHTS[0]]
    monkeypatch.setattr(hub, "WORTH_A_WAIT", 1)
    monkeypatch.setattr(time, "sleep", SLEEP)
    large = Case(tmp_path / "large", case.hub)
    large.fetch(cache=known)
    reads.clear()
    hashing.hash_files([large.dest / name for name in WEIGHTS], known)
    assert reads == []
    with (large.dest / WEIGHTS[0]).open("r+b") as file:
        file.write(b"x")
    assert hashing.hash_file(large.dest / WEIGHTS[0], known) != sha256(case.hub.files[WEIGHTS[0]]).hexdigest()


def test_files_of_a_checkpoint_come_side_by_side(case: Case) -> None:
    """A hub may send each of them at a fraction of what the network carries: the second comes while the first waits."""
    case.hub.stall_after[WEIGHTS[0]] = CHUNK
    thread = Thread(target=case.fetch, daemon=True)
    thread.start()
    wait_until(case.hub.stalled.is_set)
    wait_until(
        lambda: any(request.sent == len(case.hub.files[WEIGHTS[1]]) for request in case.hub.downloads(WEIGHTS[1]))
    )
    assert len(case.hub.downloads(WEIGHTS[0])) == 1
    case.hub.released.set()
    thread.join(PATIENCE)
    assert {name: (case.dest / name).read_bytes() for name in WEIGHTS} == {
        name: case.hub.files[name] for name in WEIGHTS
    }


def test_the_first_file_that_can_not_be_had_is_the_error_and_ends_the_others(
    case: Case,
) -> None:
    """After the piece that arrives, however long they would take. What came is kept; the next run asks for the rest."""
    good, bad = WEIGHTS
    case.hub.served[bad] = bytes(len(case.hub.files[bad]))
    case.hub.rates[good] = len(case.hub.files[good]) / 20  # bytes a second, so that it would take 20 s
    blobs = case.cache_dir / "models--acme--tiny/blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{sha256(case.hub.files[good]).hexdigest()}.shardmill.incomplete"
    partial.write_bytes(case.hub.files[good][:CHUNK])
    message = case.refused()
    assert message.startswith(f"{bad} arrived damaged")
    held = partial.stat().st_size
    assert CHUNK <= held < len(case.hub.files[good]) and partial.read_bytes() == case.hub.files[good][:held]
    case.hub.served.clear()
    case.hub.rates.clear()
    case.fetch()
    assert case.hub.downloads(good)[-1].range == f"bytes={held}-"


def test_bytes_that_were_taken_out_again_leave_no_hash(tmp_path: Path) -> None:
    """A server that ignores the range of a resumed download sends the whole file."""
    with BoundedFile(tmp_path / "part", 100, Event()) as file:
        file.write(b"a" * 10)
        assert file.sha256() == sha256(b"a" * 10).hexdigest()
        file.truncate(4)
        file.seek(4)
        assert file.sha256() is None
        file.write(b"b" * 6)
        assert file.sha256() is None


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_download_resumes_in_a_new_process(case: Case, number: signal.Signals) -> None:
    """A process that ends in the middle of a file leaves what it had; the next run continues from there.

    Ctrl-C ends it though the hub sends nothing that a stream could stop at.
    """
    name = "model-00001-of-00002.safetensors"
    case.hub.stall_after[name] = 4 * CHUNK
    script = f"""
from pathlib import Path
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}
from shardmill import interrupt
from shardmill.checkpoint.fetch import fetch
interrupt.ends_this_process("interrupted")
fetch(path=None, repo={REPO!r}, revision={COMMIT!r}, dest=Path({str(case.dest)!r}), cache=None)
"""
    env = os.environ | {"HF_ENDPOINT": case.hub.endpoint, "HF_HUB_CACHE": str(case.cache_dir)}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: case.hub.stalled.is_set() or process.poll() is not None)
        blobs = case.cache_dir / "models--acme--tiny" / "blobs"
        partial = blobs / f"{sha256(case.hub.files[name]).hexdigest()}.shardmill.incomplete"
        wait_until(lambda: partial.stat().st_size == 4 * CHUNK)
    finally:
        process.send_signal(number)
        code = process.wait(PATIENCE)
    assert code == {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130}[number]
    assert not case.dest.exists()
    case.fetch()
    _, resumed = case.hub.downloads(name)
    assert resumed.range == f"bytes={4 * CHUNK}-"
    assert resumed.sent == len(case.hub.files[name]) - 4 * CHUNK
    assert (case.dest / name).read_bytes() == case.hub.files[name]


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_damaged_file_is_named_removed_and_fetched_anew(case: Case, name: str) -> None:
    """Bytes that are not the hub's never land; the rerun gets the right ones."""
    right = case.hub.files[name]
    case.hub.served[name] = right[:-1] + bytes([right[-1] ^ 1])
    message = case.refused()
    assert name in message
    assert "arrived damaged" in message
    assert not list(case.cache_dir.glob(f"**/{name}"))
    ids = (sha256(right).hexdigest(), git_blob_id(right))
    assert not [path.name for path in case.cache_dir.glob("*/blobs/*") if path.name.startswith(ids)]
    case.hub.served.clear()
    case.fetch()
    assert (case.dest / name).read_bytes() == right


def test_cache_damaged_on_disk_is_found(case: Case) -> None:
    """A blob that rotted in the cache after its download is found by its hash, removed, and fetched anew."""
    case.fetch()
    name = "model-00001-of-00002.safetensors"
    blob = (case.dest / name).resolve()
    shutil.rmtree(case.dest)
    cached = next((case.cache_dir / "models--acme--tiny").glob(f"snapshots/*/{name}")).resolve()
    content = bytearray(cached.read_bytes())
    content[-1] ^= 1
    cached.write_bytes(content)
    assert name in case.refused()
    case.fetch()
    assert (case.dest / name).read_bytes() == case.hub.files[name]
    assert blob.name == name


@pytest.mark.parametrize(("status", "remedy"), [(401, "set HF_TOKEN"), (403, "no access yet")])
def test_gated_model_says_how_to_get_in(case: Case, status: int, remedy: str) -> None:
    """A gated model's error names the page where its licence is accepted, and what to do with the token."""
    case.hub.gated_status = status
    message = case.refused()
    assert f"{case.hub.endpoint}/{REPO}" in message and remedy in message


def test_refused_token(case: Case) -> None:
    """A token that the hub does not know is an error about the token, and the right one is sent and works."""
    case.hub.token = "hf_right"
    assert "HF_TOKEN" in case.refused(token="hf_wrong")
    case.fetch(token="hf_right")
    assert {r.token for r in case.hub.downloads("config.json")} == {"hf_right"}
    assert {r.token for r in case.hub.requests if r.path.startswith("/cdn")} == {None}


def test_missing_repository(case: Case) -> None:
    assert "no such model" in case.refused(repo="acme/absent")


def test_missing_revision(case: Case) -> None:
    message = case.refused(revision="0" * 40)
    assert "has no revision" in message and "/commits/main" in message


@pytest.mark.parametrize("revision", ["main", None, "v1"])
def test_names_that_move_are_refused(case: Case, revision: str | None) -> None:
    """A branch is not a pin: the error gives the commit and how to keep it. A tag that is not there is missing."""
    message = case.refused(revision=revision)
    assert (f"{COMMIT} now; `shardmill lock CONFIG` keeps it" in message) == (revision != "v1")
    assert not any("safetensors" in r.path for r in case.hub.requests)


def test_not_a_repository_name(case: Case) -> None:
    assert "owner/name" in case.refused(repo="a/b/c")


def test_pickle_checkpoint_is_refused(case: Case) -> None:
    """Weights that can run code are not even downloaded."""
    case.hub.files = {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04"}
    message = case.refused()
    assert "pytorch_model.bin" in message and "pickle" in message
    assert not case.hub.downloads("pytorch_model.bin")


@pytest.mark.parametrize("name", ["../evil.json", "/tmp/evil.json", "a/../../evil.json", "..\\evil.json"])
def test_listing_that_climbs_is_refused(case: Case, tmp_path: Path, name: str) -> None:
    """A hub (or a man in the middle) can't have a file written outside the cache."""
    case.hub.files[name] = b"{}"
    assert "leaves the checkpoint folder" in case.refused()
    assert not list(tmp_path.rglob("*evil.json"))


def test_index_that_climbs_is_refused(case: Case) -> None:
    case.hub.files["model.safetensors.index.json"] = index_of({"w": "../../../secret.safetensors"})
    assert "leaves the checkpoint folder" in case.refused()


def test_index_of_a_file_the_repository_lacks(case: Case) -> None:
    case.hub.files["model.safetensors.index.json"] = index_of({"w": "model-9.safetensors"})
    assert "model-9.safetensors" in case.refused()


def test_no_network(case: Case) -> None:
    case.hub.endpoint = "http://127.0.0.1:9"
    message = case.refused()
    assert "http://127.0.0.1:9" in message and "run again" in message


def test_full_disk_is_said_before_the_download(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "disk full" in case.refused()
    sizes = [len(body) for name, body in case.hub.files.items() if name.endswith(".safetensors")]
    partial = next(case.cache_dir.glob("*/blobs")) / (
        sha256(case.hub.files["model-00001-of-00002.safetensors"]).hexdigest() + ".shardmill.incomplete"
    )
    partial.write_bytes(case.hub.files["model-00001-of-00002.safetensors"][:CHUNK])
    usage = usage._replace(free=sum(sizes) - CHUNK)
    assert not any(r.path.startswith("/cdn") for r in case.hub.requests)
    case.fetch()  # what an interrupted run left need not fit a second time


def test_environment_is_honoured(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HOME choose hub and cache; then HF_HUB_OFFLINE=1 works without a hub, and only then."""
    script = (
        "import sys; from pathlib import Path; from shardmill.checkpoint.fetch import fetch\n"
        f"fetch(path=None, repo={REPO!r}, revision={COMMIT!r}, dest=Path(sys.argv[1]), cache=None)"
    )

    def run(dest: str, **env: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")} | env
        command = [sys.executable, "-c", script, str(tmp_path / dest)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)

    cold = run("cold", HF_HUB_OFFLINE="1").stderr.splitlines()[-1]
    # Another client may have left every file and no list.
    assert [said in cold for said in ("lacks files of", "or the hub's list of them", "run once online")] == [True] * 3
    assert hub.requests == []
    succeeded(run("online"))
    hub.requests.clear()
    succeeded(run("offline", HF_HUB_OFFLINE="1"))
    assert hub.requests == []
    assert (tmp_path / "offline" / "source.json").read_text() == (tmp_path / "online" / "source.json").read_text()


def unresolved(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Names that are asked for from now on; the first `times` of them have no address."""
    asked: list[str] = []
    look_up = socket.getaddrinfo

    def answer(host: str, *others: Any, **options: Any) -> Any:
        asked.append(host)
        if len(asked) > times:
            return look_up(host, *others, **options)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setenv("NO_PROXY", "*")
    close_session()  # its connections, and a proxy
    return asked


def test_without_a_network_the_hub_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub client alone asks six times, and waits for 31 seconds in between."""
    asked = unresolved(monkeypatch, times=10)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    nowhere: Any = SimpleNamespace(endpoint="http://hub.invalid")
    why = "hub.invalid: this name has no address here; connect to a network, or check HF_ENDPOINT"
    assert (Case(tmp_path, nowhere).refused(), asked) == (why, ["hub.invalid"])


def test_a_download_outlives_a_moment_without_a_network(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.fetch()
    asked = unresolved(monkeypatch, times=2)
    assert Case(tmp_path / "again", case.hub).fetch()["commit"] == COMMIT
    assert len(asked) > 2
