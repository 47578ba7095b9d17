"""Downloads one pinned commit of a hub repository into the hub's cache and checks every byte.

Every file is streamed here, through the client's own `http_get`, to a name made from its checked id. A file enters the
cache only after its bytes match this id. huggingface_hub's own download is not used, for two reasons. It uses the ETag
of an answer as a file name without a check (docs/upstream.md). It also gives every download a new temporary name and
deletes the file on failure, so that a killed process would begin its gigabytes anew.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from types import MappingProxyType

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache, write_tree_cache
from huggingface_hub.file_download import _create_symlink, http_get, repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

from shardmill.checkpoint.cache import RACY_NS, ByteSpan, FileState, HashCache, file_state
from shardmill.checkpoint.hashing import hash_file, hash_files
from shardmill.checkpoint.hub_limits import (
    MOST_FILES,
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
from shardmill.checkpoint.layout import text_files, weight_files
from shardmill.checkpoint.modules import TEXT_SETTINGS
from shardmill.checkpoint.paths import COMMIT, Row, check_name, describe_missing_config, is_commit
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


_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubAccess:
    """The hub's endpoint, cache folder and token; the defaults are the hub client's own environment variables."""

    endpoint: str = constants.ENDPOINT
    cache_dir: Path = Path(constants.HF_HUB_CACHE)
    token: str | None = None

    @property
    def api(self) -> HfApi:
        """Return the hub client for this endpoint, which refuses long waits."""
        use_client()
        return HfApi(endpoint=self.endpoint, token=self.token)


@dataclass(frozen=True)
class RemoteFile:
    """A file in the hub's listing: `sha256` if it lies in large-file storage (LFS), otherwise only a git blob id."""

    name: str
    size: int
    blob_id: str
    sha256: str | None

    @property
    def blob(self) -> str:
        """Return the name of the file's blob in the hub cache."""
        return self.sha256 or self.blob_id

    @property
    def row(self) -> Row:
        """Return the file as a lock has it."""
        return self.name, self.size, f"sha256:{self.sha256}" if self.sha256 else f"git:{self.blob_id}"


def resolve(repo: str, revision: str | None, access: HubAccess) -> tuple[str, list[Row]]:
    """Return the commit that a revision is now, and what the hub lists there. Raises CheckpointError."""
    use_client()
    with explain_http(repo, revision, access.endpoint):
        commit = _resolve_revision(repo, revision, access)
        _, _, listing = _listed(repo, commit, access)
        return commit, sorted(file.row for file in listing.values())


def _pinned(repo: str, revision: str | None, access: HubAccess) -> str:
    """Return `revision` if it is a commit. Otherwise raise a CheckpointError that names the commit that it is now."""
    if revision and is_commit(revision):
        return revision
    commit = _resolve_revision(repo, revision, access)
    raise CheckpointError(
        f"{repo}: revision {revision or 'main'!r} is a name that can move, and {commit} now; `shardmill lock CONFIG` "
        "keeps it"
    )


def _resolve_revision(repo: str, revision: str | None, access: HubAccess) -> str:
    """Return the current commit of `revision`."""
    if revision and is_commit(revision):
        return revision
    with understood(access.endpoint):
        info = within(SMALL_SECONDS, lambda: access.api.model_info(repo, revision=revision), access.endpoint)
        if not is_commit(str(info.sha)):
            raise ValueError("no commit")
        if str(info.id).casefold() != repo.casefold():  # the hub goes on from an old name for as long as it is free
            raise CheckpointError(f"{repo}: is called {info.id} now; write that name")
    return str(info.sha)


def _listed(
    repo: str, commit: str, access: HubAccess, locked: Sequence[Row] | None = None
) -> tuple[Path, Path, dict[str, RemoteFile]]:
    """Return a repository's folder in the hub cache, the folder of a commit in it, and the commit's files by name.

    The listing comes from the cache if possible, because a commit never changes.

    Args:
        repo: owner/name.
        commit: 40 hexadecimal digits.
        access: the hub.
        locked: what a lock says that the hub lists; None without a lock.

    Raises:
        CheckpointError: a name leads out of the checkpoint, an id or a size is invalid, or a lock says otherwise.
    """
    folder, snapshot, files = _listing(repo, commit, access)
    if locked is not None:
        _check_locked(f"{repo}@{commit[:7]}", {file.row for file in files.values()}, locked)
    return folder, snapshot, files


def _check_locked(source: str, listed: set[Row], locked: Sequence[Row]) -> None:
    other = sorted(listed ^ {(name, size, digest) for name, size, digest in locked})
    if other:
        raise CheckpointError(
            f"{source}: {other[0][0]}: the hub and the lock say different things of it; check HF_ENDPOINT, or take "
            "what the hub has with `shardmill lock --upgrade CONFIG`"
        )


def _listing(repo: str, commit: str, access: HubAccess) -> tuple[Path, Path, dict[str, RemoteFile]]:
    folder = access.cache_dir / repo_folder_name(repo_id=repo, repo_type="model")
    snapshot = folder / "snapshots" / commit
    with understood(access.endpoint):
        # The public get_cached_repo_tree leaves out the sha256 that its file holds.
        known = read_tree_cache(str(folder), commit)
        if known is not None:
            listed = (RemoteFile(n, f.size, f.blob_id, f.lfs_sha256) for n, f in known.items())
            return folder, snapshot, _checked(listed, repo)
        tree = within(SMALL_SECONDS, lambda: _asked(repo, commit, access), access.endpoint)
        files = _checked((RemoteFile(f.path, f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in tree), repo)
    write_tree_cache(str(folder), commit, {file.name: _entry(file) for file in files.values()})
    return folder, snapshot, files


def _asked(repo: str, commit: str, access: HubAccess) -> list[RepoFile]:
    tree = access.api.list_repo_tree(repo, recursive=True, revision=commit)
    files = [entry for entry in islice(tree, MOST_FILES + 1) if isinstance(entry, RepoFile)]
    if len(files) > MOST_FILES:
        raise CheckpointError(f"{repo}: the hub lists more than {MOST_FILES} files; choose a repository of one model")
    return files


def _checked(files: Iterable[RemoteFile], repo: str) -> dict[str, RemoteFile]:
    checked = {}
    for file in files:
        check_name(file.name, repo)
        sound = COMMIT.fullmatch(file.blob_id) and (file.sha256 is None or _SHA256.fullmatch(file.sha256))
        if not sound or type(file.size) is not int or not 0 <= file.size < 2**63:
            raise CheckpointError(
                f"{repo}: {file.name}: the hub lists it with an invalid id or size; check HF_ENDPOINT"
            )
        checked[file.name] = file
    return checked


def _entry(file: RemoteFile) -> TreeCacheEntry:
    return TreeCacheEntry(file.size, file.blob_id, file.sha256, file.size if file.sha256 else None)


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
        commit = _pinned(repo, revision, access)
        folder, snapshot, listing = _listed(repo, commit, access, locked)
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
    _, snapshot, listing = _listing(repo, commit, access)
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
        commit = _pinned(repo, revision, access)
        _, snapshot, listing = _listed(repo, commit, access, locked)
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
        commit = _resolve_revision(repo, revision, access)
        folder, snapshot, listing = _listed(repo, commit, access)
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
