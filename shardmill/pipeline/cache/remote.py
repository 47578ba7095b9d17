"""A store that machines share: a bucket or a folder with a URL, which passes results from one machine to the others.

    <URL>/v1/files/<sha256>         the bytes of a file, once for all entries that have the file.
    <URL>/v1/entries/<key>.json     the files of an entry by their sha256, and their sizes; written last.

So an entry appears whole or not at all, and a machine that takes it can check every byte. A file system that writes
whole objects only (S3, for example) never shows half a file; in a folder each file appears by a rename. If anything is
missing or damaged, the entry is refused, and the step works as if the entry did not exist.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import dumps, parse_json, replacing, sealed
from shardmill.pipeline.cache import entry as cache_entry
from shardmill.pipeline.task import Work
from shardmill.printable import one_line, printable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem, Callback

URL, MODE = "SHARDMILL_REMOTE_STORE", "SHARDMILL_REMOTE_STORE_MODE"
READ, READ_WRITE = "read", "read-write"
FORM = "v1"  # version of the layout; another version would lie beside it
AT_A_TIME = 8  # files
ENTRY_BYTES = 64_000_000  # of an entry's list of files; a list of 100,000 files has 20 MB
LONGEST, LONGEST_PATH = 255, 1024  # bytes of a file's name, and of its path in an entry
WITH_USERS = ("sftp", "ssh", "ftp")  # protocols whose URLs name a user; elsewhere it may be a token
ALSO = {"s3a": "s3"}
SHA256 = re.compile(r"[0-9a-f]{64}")
# A store that does not answer must not hold up every job: after a few seconds the step works.
PATIENCE: Mapping[str, Mapping[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 10, "retries": {"total_max_attempts": 2}}},
}


class RemoteRefusal(ShardmillError):
    """A stored entry that is damaged, incomplete or wrong."""


@dataclass(frozen=True)
class Remote:
    """The location of a remote store.

    Attributes:
        url: a URL that fsspec understands: s3://bucket/folder, gs://..., file:///folder.
        writable: whether results of this machine are sent to the store.
    """

    url: str
    writable: bool = True

    @property
    def protocol(self) -> str:
        """Return the file system's name, the usual one of several."""
        scheme = urlsplit(self.url).scheme or "file"
        return ALSO.get(scheme, scheme)


def configured(environment: Mapping[str, str] = os.environ) -> Remote | None:
    """Return the remote store that the environment names, if it names one.

    Raises:
        ShardmillError: its value makes no sense, or contains a password.
    """
    url, mode = environment.get(URL, ""), environment.get(MODE, READ_WRITE)
    if not url:
        return None
    if mode not in (READ, READ_WRITE):
        raise ShardmillError(f"{MODE}: {mode!r} is neither {READ!r} nor {READ_WRITE!r}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ShardmillError(f"{URL}: {_refusal_reason(error)}") from error
    user, at, _ = parts.netloc.rpartition("@")
    more = "://" in url and (parts.query or parts.fragment)  # in a path these are ordinary characters
    if more or "::" in url or (at and (":" in user or parts.scheme not in WITH_USERS)):
        raise ShardmillError(f"{URL}: holds a password or a token; give it where the file system's own settings are")
    if not ("://" in url or Path(url).is_absolute()) or (parts.scheme == "file" and parts.netloc):
        raise ShardmillError(f"{URL}: is no URL such as s3://bucket/folder, and no absolute path")
    if parts.scheme == "memory":
        raise ShardmillError(f"{URL}: memory is each process' own; name a folder or a bucket")
    return Remote(url, mode == READ_WRITE)


def check_configured() -> None:
    """Raise ShardmillError if the environment names a store that this installation can't use."""
    remote = configured()
    if remote:
        check_address(remote)


def check_address(remote: Remote) -> None:
    """Raise ShardmillError if this installation has no file system for the URL."""
    try:
        _opened(remote)
    except ImportError as error:
        extra = "pip install -e '.[s3]' in a clone" if remote.protocol == "s3" else str(error)
        raise ShardmillError(f"{URL}: {remote.protocol} needs a package that is not installed: {extra}") from error
    except Exception as error:  # whatever a file system raises for its settings
        raise ShardmillError(f"{URL}: {_refusal_reason(error)}") from error


@dataclass(frozen=True)
class Listed:
    """A file of an entry: its sha256, and its size in bytes, which older entries do not record."""

    sha256: str
    size: int | None


def find_entry(remote: Remote, key: str) -> dict[str, Listed] | None:
    """Return an entry's files by their paths in it; None if the store lacks the entry.

    Raises:
        RemoteRefusal: the stored list is damaged, or belongs to another entry.
    """
    fs, root = _opened(remote)
    name = f"{root}/entries/{key}.json"
    try:
        content = fs.cat_file(name, start=0, end=ENTRY_BYTES)
    except FileNotFoundError:
        return None
    if len(content) == ENTRY_BYTES:
        raise RemoteRefusal(f"{name} is longer than any list of files")
    return _listed(name, key, content)


def bring(remote: Remote, files: Mapping[str, Listed], made: Mapping[str, Path], pool: Path) -> None:
    """Write an entry's files to where a step would have made them.

    Args:
        remote: the store.
        files: the entry's files, as `find_entry` returned them.
        made: output name -> path to write to.
        pool: a folder with files that are here already, named by their sha256.

    Raises:
        RemoteRefusal: the stored entry is damaged, incomplete or another's.
    """
    fs, root = _opened(remote)
    targets = _targets(files, made)

    def get(target: Path) -> None:
        sha256 = targets[target].sha256
        target.parent.mkdir(parents=True, exist_ok=True)
        if _is_here(pool / sha256, target, sha256):
            return
        try:
            bound = _bound(target.name, targets[target].size)
            if getattr(fs, "local_file", False):  # a local file system copies without callbacks
                bound.set_size(fs.size(f"{root}/files/{sha256}"))
            fs.get_file(f"{root}/files/{sha256}", str(target), callback=bound)
        except FileNotFoundError as error:
            raise RemoteRefusal(f"{target.name} is gone from it") from error
        if hash_file(target) != sha256:
            raise RemoteRefusal(f"{target.name} is damaged there")

    _each(get, targets)


def _keep_shared(remote: Remote, key: str, entry: Path, files: Mapping[str, str], anew: bool = False) -> None:
    """Send an entry.

    Args:
        remote: the store, which is writable.
        key: the action's key.
        entry: the entry's folder here.
        files: path in the entry -> sha256.
        anew: also send files that the store seems to have, because one of the stored files is wrong.
    """
    fs, root = _opened(remote)

    def put(path: str) -> None:
        source, target = entry / path, f"{root}/files/{files[path]}"
        if anew or _size(fs, target) != source.stat().st_size:
            _write(fs, target, source)

    _each(put, {sha256: path for path, sha256 in files.items()}.values())  # each content once
    sizes = {sha256: (entry / path).stat().st_size for path, sha256 in files.items()}
    text = dumps(sealed({"key": key, "files": dict(files), "sizes": sizes})).encode()
    _write(fs, f"{root}/entries/{key}.json", text)


def _refusal_reason(error: BaseException) -> str:
    """Return what went wrong, in a few words."""
    return one_line(str(error).strip() or type(error).__name__)


def _opened(remote: Remote) -> tuple[AbstractFileSystem, str]:
    """Return the file system and the folder in it. fsspec caches file systems."""
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(remote.url, use_listings_cache=False, **PATIENCE.get(remote.protocol, {}))
    fs.retries = 1  # s3fs's retries, which would multiply the retries of its library
    return fs, f"{root.rstrip('/')}/{FORM}"


def _bound(name: str, size: int | None) -> Callback:
    """Return a callback that ends a transfer with RemoteRefusal once a file is larger than its listed size."""
    from fsspec import Callback

    class Bound(Callback):  # type: ignore[misc]
        def set_size(self, size_there: int | None) -> None:
            self._check(size_there or 0)

        def absolute_update(self, value: int) -> None:
            self.value = value
            self._check(value)

        def relative_update(self, inc: int = 1) -> None:
            self.absolute_update(self.value + inc)

        def _check(self, received: int) -> None:
            if size is not None and received > size:
                raise RemoteRefusal(f"{name} has more than the {size} bytes that are listed")

    return Bound()


def _listed(name: str, key: str, text: bytes) -> dict[str, Listed]:
    """Return the files that a stored list names, by their paths in the entry. Raise RemoteRefusal."""
    try:
        content = parse_json(text)
        sizes, whole = content.get("sizes"), sealed(content) == content
        files = {
            path: Listed(sha256, None if sizes is None else sizes[sha256]) for path, sha256 in content["files"].items()
        }
        whole = whole and all(SHA256.fullmatch(file.sha256) for file in files.values())
        whole = whole and all(
            file.size is None or (type(file.size) is int and file.size >= 0) for file in files.values()
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RemoteRefusal(f"{name} is damaged") from error
    if not whole:
        raise RemoteRefusal(f"{name} is damaged")
    if content["key"] != key:
        raise RemoteRefusal(f"{name} is of another entry")
    return files


def _targets(files: Mapping[str, Listed], made: Mapping[str, Path]) -> dict[Path, Listed]:
    """Return the files by the paths to write them to. Raise RemoteRefusal if an entry has other files."""
    known = {path.name: path for path in made.values()}
    targets = {}
    for file, listed in files.items():
        first, *inner = PurePosixPath(file).parts or ("",)
        if first not in known or ".." in inner or not _can_be(file):
            raise RemoteRefusal(f"{printable(file)} is no output of this step")
        targets[known[first].joinpath(*inner)] = listed
    both = next((path.name for path in targets if not targets.keys().isdisjoint(path.parents)), None)
    if both is not None:
        raise RemoteRefusal(f"{printable(both)} is in a folder that is a file, too")
    lacking = set(known) - {PurePosixPath(file).parts[0] for file in files}
    if lacking:
        raise RemoteRefusal(f"{min(lacking)} is not in it")
    return targets


def _can_be(path: str) -> bool:
    """Return whether a path is a valid path of a file."""
    whole = os.fsencode(path)
    return b"\0" not in whole and len(whole) <= LONGEST_PATH and all(len(part) <= LONGEST for part in whole.split(b"/"))


def _is_here(local: Path, target: Path, sha256: str) -> bool:
    """Return whether a file was here already, and now is at `target` too."""
    with contextlib.suppress(OSError):
        os.link(local, target)
        if hash_file(target) == sha256:
            return True
        target.unlink()
    return False


def _size(fs: AbstractFileSystem, path: str) -> int | None:
    """Return a file's size in bytes; None if it does not exist."""
    try:
        return int(fs.info(path)["size"])
    except FileNotFoundError:
        return None


def _write(fs: AbstractFileSystem, path: str, content: Path | bytes) -> None:
    """Put a file, or some bytes, at a path at once."""
    if "file" in fs.protocol:
        with replacing(Path(path)) as temporary:
            if isinstance(content, Path):
                shutil.copyfile(content, temporary)
            else:
                temporary.write_bytes(content)
    elif isinstance(content, Path):
        fs.put_file(str(content), path)
    else:
        fs.pipe_file(path, content)


def _each(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Do work on several items at a time. Raise the first error, after which no other item is begun."""
    pool = ThreadPoolExecutor(AT_A_TIME)
    try:
        for done in as_completed([pool.submit(work, item) for item in items]):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


log = logging.getLogger(__name__)
MARK = ".remote-silent"  # in the local store: the time of the last wait for the remote store in vain
LONG = 5.0  # seconds without an answer
PAUSE = 300.0  # seconds without another attempt: a build may have a thousand jobs


class PullResult(Enum):
    """The result of asking the remote store for an entry."""

    UNASKED = "no remote store, or the entry was here"
    TAKEN = "the entry is here now"
    NONE = "it has no such entry"
    REFUSED = "it has one that is not what it should be"
    SILENT = "it could not be asked"


def pull(shared: Remote | None, entry: Path, fill: Callable[[Work], None]) -> PullResult:
    """Look for an entry and take it.

    Args:
        shared: the store, if there is one.
        entry: the entry's folder in the local store.
        fill: runs a work and keeps its result as the entry.
    """
    if shared is None:
        return PullResult.UNASKED
    key, pool, mark = entry.name, entry.parent / cache_entry.FOLDER, entry.parent / MARK
    if 0 <= (ago := time.time() - _written(mark)) < PAUSE:
        log.info("remote store: not asked, as it was silent %.0f s ago", ago)
        return PullResult.SILENT
    began = time.monotonic()
    try:
        files = find_entry(shared, key)
        if files is None:
            return PullResult.NONE
        fill(lambda made: bring(shared, files, made, pool))
    except RemoteRefusal as error:
        log.warning("remote store: entry %s refused: %s; made here instead", key[:12], error)
        return PullResult.REFUSED
    except Exception as error:  # whatever a file system raises: the work can be done here
        log.warning("remote store: entry %s can't be had: %s; made here instead", key[:12], _refusal_reason(error))
        if time.monotonic() - began > LONG and _is_timeout(error):
            with contextlib.suppress(OSError):  # another user's store
                mark.touch()
        return PullResult.SILENT
    log.info("taken from the remote store")
    return PullResult.TAKEN


def _is_timeout(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is a timeout; each library has its own class for that."""
    while error is not None:
        if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _written(file: Path) -> float:
    """Return when a file was written last; 0 if the file does not exist."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def push(shared: Remote | None, entry: Path, files: Mapping[str, str], answer: PullResult) -> None:
    """Send an entry that was made here.

    Args:
        shared: the store.
        entry: the entry's folder.
        files: path in the entry -> sha256.
        answer: the result of asking the store for the entry; a store that did not answer is sent nothing.
    """
    if shared is None or not shared.writable or answer is PullResult.SILENT:
        return
    try:
        _keep_shared(shared, entry.name, entry, files, anew=answer is PullResult.REFUSED)
    except Exception as error:  # the build has what it needs
        log.warning("remote store: entry %s was not sent: %s", entry.name[:12], _refusal_reason(error))
