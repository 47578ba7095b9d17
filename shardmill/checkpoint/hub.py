"""Downloads a commit of a hub repository into the hub's cache and checks every byte.

Every file is streamed here, through the client's own `http_get`, to a name made from its checked id. A file enters the
cache only after its bytes match this id. huggingface_hub's own download is not used, for two reasons. It uses the ETag
of an answer as a file name without a check (docs/upstream.md). It also gives every download a new temporary name and
deletes the file on failure, so that a killed process would begin its gigabytes anew.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from types import MappingProxyType

from huggingface_hub import constants, hf_hub_url
from huggingface_hub._tree_cache import read_tree_cache
from huggingface_hub.file_download import _create_symlink, http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

from shardmill.checkpoint.cache import RACY_NS, ByteSpan, FileState, HashCache, file_state
from shardmill.checkpoint.hashing import hash_file, hash_files
from shardmill.checkpoint.hub_limits import (
    SMALL_BYTES,
    SMALL_SECONDS,
    TEXT_BYTES,
    BoundedFile,
    explain_http,
    understood,
    use_client,
    within,
    without_pages,
)
from shardmill.checkpoint.hub_listing import HubAccess, RemoteFile, commit_of, listed, listing_of, pinned
from shardmill.checkpoint.layout import text_files, weight_files
from shardmill.checkpoint.modules import TEXT_SETTINGS
from shardmill.checkpoint.paths import Row, describe_missing_config
from shardmill.errors import CheckpointError

log = logging.getLogger(__name__)


@contextmanager
def reporting(name: str, arrived: Callable[[], int], size: int, seconds: float = 10.0) -> Iterator[None]:
    """Log every `seconds`, inside the `with` block, how many of `size` bytes are there, and how long the rest takes.

    Args:
        name: of what comes.
        arrived: returns the bytes that are there.
        size: of all.
        seconds: between two lines.
    """
    done, start, began = threading.Event(), arrived(), time.monotonic()

    def report() -> None:
        while not done.wait(seconds):
            count = arrived()
            rate = (count - start) / (time.monotonic() - began)
            rest = f"{rate / 1e6:.1f} MB/s, about {(size - count) / rate:.0f} s left" if rate else "nothing comes"
            log.info("%s: %.2f of %.2f GB, %s", name, count / 1e9, size / 1e9, rest)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


STREAMS = 4  # files that are downloaded at a time
NEVER = Event()
WORTH_A_WAIT = 1_000_000_000  # bytes that take longer to hash again than to settle
CONFIG = "config.json"
HUB_S_OWN = ".gitattributes"  # the hub writes it into every repository


def download(
    repo: str,
    revision: str | None,
    access: HubAccess,
    cache: HashCache | None,
    locked: Sequence[Row] | None = None,
) -> tuple[Path, dict[str, str]]:
    """Return the cached snapshot folder of a commit, and the sha256 of each of its checkpoint files by name.

    `locked` is what a lock says that the hub lists there.

    Raises CheckpointError: revision not pinned, other files than locked, no access, no network, no space, damaged
    files, no safetensors, answers that are not a hub's. A damaged file is removed from the cache, so that the next run
    fetches it anew.
    """
    use_client()
    with explain_http(repo, revision, access.endpoint):
        commit = pinned(repo, revision, access)
        folder, snapshot, listing = listed(repo, commit, access, locked)
        texts = [listing[name] for name in text_files(listing)]
        for file in texts:
            _check_small(repo, file)
        if (size := sum(file.size for file in texts)) > TEXT_BYTES:
            raise CheckpointError(f"{repo}: its text files have {size} bytes; together they may have {TEXT_BYTES}")
        _check_space(folder, texts)
        for file in texts:
            within(SMALL_SECONDS, partial(_bring, repo, file, snapshot, access), f"{repo}: {file.name}")
        hashes = _verified(snapshot, texts, cache)
        weights = [listing[name] for name in weight_files(snapshot, listing, f"{repo}@{commit[:7]}")]
        _check_space(folder, weights)
        brought = _bring_all(repo, folder, weights, lambda file, stop: _bring(repo, file, snapshot, access, stop))
        return snapshot, hashes | _verified(snapshot, weights, cache, brought)


def amounts(repo: str, commit: str, access: HubAccess) -> tuple[int, int] | None:
    """Return the bytes of a commit's checkpoint, and how many of them are not in the cache.

    None if the cache has no listing of the commit; the hub is not asked. Before the index of the weights is there, all
    safetensors files count.
    """
    folder = access.cache_dir / repo_folder_name(repo_id=repo, repo_type="model")
    if read_tree_cache(str(folder), commit) is None:
        return None
    _, snapshot, listing = listing_of(repo, commit, access)
    try:
        weights = weight_files(snapshot, listing, repo)
    except CheckpointError:
        weights = [name for name in listing if name.endswith(".safetensors")]
    files = [listing[name] for name in {*text_files(listing), *weights}]
    return sum(file.size for file in files), sum(_missing_bytes(folder, file) for file in files)


def _check_small(repo: str, file: RemoteFile) -> None:
    if file.size > SMALL_BYTES:
        raise CheckpointError(f"{repo}: {file.name} has {file.size} bytes; a text file may have {SMALL_BYTES}")


def download_config(
    repo: str, revision: str | None, access: HubAccess, locked: Sequence[Row] | None = None, more: Sequence[str] = ()
) -> Path:
    """Return config.json of a commit in the hub's cache, checked as all files are. Raises CheckpointError.

    The files that say how long an encoder's texts may be are brought, too, and so is what `more` names, if it is there.
    """
    use_client()
    with explain_http(repo, revision, access.endpoint):
        commit = pinned(repo, revision, access)
        _, snapshot, listing = listed(repo, commit, access, locked)
        if CONFIG not in listing:
            raise CheckpointError(describe_missing_config(f"{repo}@{commit[:7]}", listing))
        for file in (listing[name] for name in (CONFIG, *TEXT_SETTINGS, *more) if name in listing):
            _check_small(repo, file)
            within(SMALL_SECONDS, partial(_bring, repo, file, snapshot, access), f"{repo}: {file.name}")
            _verified(snapshot, [file], None)
        return snapshot / CONFIG


def download_all(
    repo: str, revision: str | None, access: HubAccess, cache: HashCache | None = None
) -> tuple[str, Path, list[str]]:
    """Fetch a commit; return the commit, its folder in the hub's cache and the names of its files.

    A name that can move (a branch, or None for `main`) is taken as it stands now. Every byte is checked against the
    hub's listing. Raises CheckpointError.
    """
    use_client()
    with explain_http(repo, revision, access.endpoint):
        commit = commit_of(repo, revision, access)
        folder, snapshot, listing = listed(repo, commit, access)
        files = [file for name, file in listing.items() if name != HUB_S_OWN]
        _check_space(folder, files)

        def bring(file: RemoteFile, stop: Event) -> FileState | None:
            work = partial(_bring, repo, file, snapshot, access, stop)
            return work() if file.size > SMALL_BYTES else within(SMALL_SECONDS, work, f"{repo}: {file.name}")

        _verified(snapshot, files, cache, _bring_all(repo, folder, files, bring))
        return commit, snapshot, [file.name for file in files]


def _check_space(folder: Path, files: Iterable[RemoteFile]) -> None:
    missing = sum(_missing_bytes(folder, file) for file in files)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise CheckpointError(
            f"{folder}: disk full, {missing / 1e9:.1f} GB to download and {free / 1e9:.1f} GB free; "
            "free space or move the cache with HF_HOME"
        )


def _missing_bytes(folder: Path, file: RemoteFile) -> int:
    blob = _blob(folder, file)
    if blob.exists():
        return 0
    try:
        return file.size - _partial(blob).stat().st_size
    except FileNotFoundError:
        return 0 if blob.exists() else file.size  # it may just have been renamed


def _blob(folder: Path, file: RemoteFile) -> Path:
    return folder / "blobs" / file.blob


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.shardmill.incomplete")


def _bring_all(
    repo: str, folder: Path, files: Sequence[RemoteFile], bring: Callable[[RemoteFile, Event], FileState | None]
) -> dict[str, FileState | None]:
    """Download files, several at a time, because a hub may send each file more slowly than the network allows.

    Raise the first error, or Ctrl-C, at once. The other streams then end at their next bytes and keep their bytes.

    Args:
        repo: owner/name.
        folder: the repository's folder in the hub's cache.
        files: the files to download.
        bring: downloads one file, until an event is set.
    """
    stop, pool, size = Event(), ThreadPoolExecutor(STREAMS), sum(file.size for file in files)

    def held() -> int:
        return size - sum(_missing_bytes(folder, file) for file in files)

    with reporting(repo, held, size):
        try:
            coming = {pool.submit(bring, file, stop): file.name for file in files}
            return {coming[done]: done.result() for done in as_completed(coming)}
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _bring(repo: str, file: RemoteFile, snapshot: Path, access: HubAccess, stop: Event = NEVER) -> FileState | None:
    """Download a file into the cache's blobs, resuming an earlier run's download, and link it into the snapshot.

    Returns the file's state if this call wrote the file and its sha256 was checked meanwhile; otherwise None.
    """
    folder, pointer = snapshot.parents[1], snapshot / file.name
    blob = _blob(folder, file)
    if pointer.is_symlink() and not (pointer.exists() and blob.exists() and pointer.samefile(blob)):
        pointer.unlink()  # the link leads elsewhere
    if pointer.exists():
        return None
    known = False
    lock = access.cache_dir / ".locks" / folder.name / f"{blob.name}.lock"
    for path in (blob, pointer, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            url = hf_hub_url(repo, file.name, revision=snapshot.name, endpoint=access.endpoint)
            known = _stream(url, blob, file, access, stop)
        if not pointer.exists():
            _create_symlink(str(blob), str(pointer))  # a copy if the file system has no links
        return file_state(pointer) if known else None


def _stream(url: str, blob: Path, file: RemoteFile, access: HubAccess, stop: Event) -> bool:
    """Download `url` to `blob`, which appears only if its bytes match the file's id.

    Returns whether the sha256 was checked against the hub's while the file was written.
    """
    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise CheckpointError(f"{file.name} has {file.size / 1e9:.0f} GB, more than a hub sends in one piece")
    partly = _partial(blob)
    if partly.exists() and partly.stat().st_size > file.size:
        partly.unlink()
    with (
        BoundedFile(partly, file.size, stop) as stream,
        understood(access.endpoint),
        without_pages(file.name, stream),
    ):
        http_get(
            url,
            stream,
            resume_size=stream.tell(),
            headers=build_hf_headers(token=access.token) | {"Accept-Encoding": "identity"},
            expected_size=file.size,
            displayed_filename=file.name,
        )
        written = stream.sha256() if file.sha256 else None
    if (written != file.sha256) if written else not _is(file, partly):
        partly.unlink()
        raise CheckpointError(f"{file.name} arrived damaged (its hash differs) and was removed; run again")
    partly.rename(blob)
    return written is not None


def _verified(
    snapshot: Path,
    files: list[RemoteFile],
    cache: HashCache | None,
    brought: Mapping[str, FileState | None] = MappingProxyType({}),
) -> dict[str, str]:
    """Return sha256 of each file, after comparing its bytes with the hub's sha256 (LFS) or git blob id.

    Args:
        snapshot: the folder of the commit.
        files: the files to verify.
        cache: the cache of hashes, or None.
        brought: by name, the state of each file whose sha256 was checked while the file was written.
    """
    fresh = {file: state for file in files if (state := brought.get(file.name)) == file_state(snapshot / file.name)}
    hashes = hash_files([snapshot / file.name for file in files if file not in fresh], cache)
    hashes |= {snapshot / file.name: str(file.sha256) for file in fresh}
    if cache:
        _remember(fresh, cache)
    for file in files:
        path = snapshot / file.name
        if (hashes[path] != file.sha256) if file.sha256 else not _is(file, path):
            path.unlink()
            _blob(snapshot.parents[1], file).unlink(missing_ok=True)  # only the cache's own name, wherever it leads
            raise CheckpointError(f"{path}: not the hub's file (hash differs); removed from the cache, run again")
    return {file.name: hashes[snapshot / file.name] for file in files}


def _remember(fresh: Mapping[RemoteFile, FileState | None], cache: HashCache) -> None:
    """Record the sha256 of files that were hashed while they were written and have settled since.

    If hashing the files again would take longer than settling, wait until they settle.
    """
    states = {file: state for file, state in fresh.items() if state}
    last = max((max(state.mtime, state.ctime) for state in states.values()), default=0)
    if sum(state.size for state in states.values()) >= WORTH_A_WAIT:
        time.sleep(max(0, last + RACY_NS + 1_000_000 - time.time_ns()) / 1e9)
    for file, state in states.items():
        cache.record(state, {ByteSpan(0, state.size): str(file.sha256)}, time.time_ns())


def _is(file: RemoteFile, path: Path) -> bool:
    """Return whether the bytes at `path` match the file's id."""
    if file.sha256:
        return hash_file(path) == file.sha256
    header = b"blob %d\0" % path.stat().st_size
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.sha1(header, usedforsecurity=False))
    return digest.hexdigest() == file.blob_id
