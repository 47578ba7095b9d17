"""NAME.lock beside NAME.yaml: the commits that a config's hub repositories were resolved to, so that a build stays.

    {"sources": [{"repo": "owner/name", "revision": "main", "commit": "<40 hex>", "files": {name: {"size", "digest"}}}],
     "version": 1}

`revision` is the branch or tag that was asked. A file's digest is the one that the hub lists: `sha256:` of its bytes,
or `git:` with the id of its git blob. A pinned repository and a folder need no lock. From the first run on only the
lock decides: the main process of a build writes it, its jobs read it, and a command that only looks does not write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.checkpoint.paths import Row, is_commit
from shardmill.config import Config, Source
from shardmill.config.model import LockedSource
from shardmill.errors import ConfigError, ShardmillError
from shardmill.files import load_json, write_json
from shardmill.pipeline.options import is_locked

if TYPE_CHECKING:
    from shardmill.checkpoint.hub_listing import HubAccess

VERSION = 1
MAIN = "main"  # what is asked where a config names no revision
ONLY = ("SHARDMILL_LOCKED", "CI")  # variables with which no run takes a commit that is not locked
OFF = ("", "0", "false", "no")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|git:[0-9a-f]{40}")
_SHORT = 7  # digits of a commit in a line for people


@dataclass(frozen=True)
class Locked:
    """What a revision of a repository was resolved to: a commit, and the files that the hub lists there."""

    repo: str
    revision: str
    commit: str
    files: tuple[Row, ...]

    @property
    def said(self) -> str:
        """Return the repository and its commit for people."""
        return f"{self.repo} {self.revision} at {self.commit[:_SHORT]}"

    def source(self, lock: Path, is_new: bool = True, adapter: str | None = None) -> LockedSource:
        """Return a config's source at this commit."""
        plain = {"repo": self.repo, "revision": self.commit, "adapter": adapter}
        return LockedSource(**plain, asked=self.revision, files=self.files, lock=str(lock), is_new=is_new)


def floats(source: Source) -> bool:
    """Return whether a source names a repository by what can move: a branch, a tag, or nothing."""
    return source.repo is not None and not is_commit(source.revision)


def lock_of(file: Path | None, model: str) -> Path:
    """Return the lock of a config: the one that is there, or else where it is written.

    Args:
        file: the config; None for one that no file holds, whose lock is called by the model.
        model: the model's name.
    """
    beside = (file or Path(model + ".yaml")).with_suffix(".lock")
    here = Path(beside.name)
    return beside if beside.exists() or os.access(beside.parent, os.W_OK) else here


def read_lock(path: Path) -> dict[tuple[str, str], Locked]:
    """Return the entries of a lock by repository and revision; empty where no file is. Raises ConfigError."""
    try:
        content = load_json(path, unique=True)
        if type(content["version"]) is not int or content["version"] != VERSION:
            raise ConfigError(f"{path}: of another version of shardmill; write it anew with `{_anew(path)}`")
        entries = {(entry.repo, entry.revision): entry for entry in map(_entry, content["sources"])}
        if len(entries) < len(content["sources"]):
            raise ValueError("an entry is given twice")
    except FileNotFoundError:
        return {}
    except OSError as error:
        why = f"can't be read ({error.strerror}); allow it, or remove it and run `{_anew(path)}`"
        raise ConfigError(f"{path}: {why}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: damaged; take it back from your version control, or write it anew with `{_anew(path)}`"
        ) from error
    return entries


def _anew(path: Path) -> str:
    return f"shardmill lock --upgrade {path.with_suffix('.yaml')}"


def _entry(row: Mapping[str, Any]) -> Locked:
    """Return an entry of a lock. Raises ValueError, KeyError, TypeError or AttributeError if it is none."""
    files = tuple(sorted((name, file["size"], file["digest"]) for name, file in row["files"].items()))
    sound = all(type(size) is int and size >= 0 and _DIGEST.fullmatch(digest) for _, size, digest in files)
    named = all(isinstance(row[key], str) for key in ("repo", "revision"))
    if not (sound and files and named and is_commit(row["commit"])):
        raise ValueError("no entry")
    return Locked(row["repo"], row["revision"], row["commit"], files)


def resolved(repo: str, revision: str, access: HubAccess | None = None) -> Locked:
    """Return what a revision is now. Raises CheckpointError."""
    from shardmill.checkpoint.hub_listing import HubAccess, resolve

    commit, rows = resolve(repo, revision, access or HubAccess())
    return Locked(repo, revision, commit, tuple(rows))


def with_locks(config: Config, file: Path | None, name: str, may_ask: bool = True) -> Config:
    """Return a config whose repositories are at the commits that its lock says, or else at the newest commits.

    Args:
        config: the config.
        file: its file; None for one that no file holds.
        name: the start of an error message.
        may_ask: whether the hub is asked for what no lock says; a job never asks.

    Raises:
        ConfigError: in one line, if a commit can't be had.
    """
    if not any(map(floats, config.sources)):
        return config
    path = lock_of(file, config.model)
    lock = read_lock(path)

    def pinned(source: Source) -> Source:
        if not floats(source):
            return source
        assert source.repo is not None
        asked = source.revision or MAIN
        entry = lock.get((source.repo, asked))
        if entry is None:
            _demand_leave(path, file, f"{source.repo} {asked}", may_ask)
            entry = resolved(source.repo, asked)
        return entry.source(path, (source.repo, asked) not in lock, source.adapter)

    try:
        drafter = pinned(config.drafter) if isinstance(config.drafter, Source) else config.drafter
        return replace(config, source=pinned(config.source), drafter=drafter)
    except ConfigError:
        raise
    except ShardmillError as error:
        raise ConfigError(f"{name}: {error}") from error


@contextlib.contextmanager
def only_locked(wanted: bool) -> Iterator[None]:
    """Ask no hub for a commit inside the `with` block, as with SHARDMILL_LOCKED=1, if that is wanted."""
    before = os.environ.get(ONLY[0])
    if wanted:
        os.environ[ONLY[0]] = "1"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(ONLY[0])
            os.environ.update({} if before is None else {ONLY[0]: before})


def _demand_leave(path: Path, file: Path | None, what: str, may_ask: bool) -> None:
    """Raise ConfigError where the hub may not be asked for what no lock says."""
    command = f"shardmill lock {file or 'CONFIG'}"
    if not may_ask:
        raise ConfigError(
            f"{path}: does not say {what}, which the build's main process had; run `{command}`, and keep the lock "
            "where jobs read the config: under version control, if they get what Git knows"
        )
    only = next((name for name in ONLY if os.environ.get(name, "").lower() not in OFF), None)
    if only:
        raise ConfigError(f"{path}: does not say {what}, and {only} lets no run choose a commit; run `{command}`")


def fresh(config: Config) -> Iterator[Locked]:
    """Yield what a config with locks has that no lock says yet."""
    for source in config.sources:
        if is_locked(source) and source.is_new:
            assert source.repo is not None and source.revision is not None
            yield Locked(source.repo, source.asked, source.revision, source.files)


def relock(config: Config, file: Path, upgrade: bool) -> str:
    """Write a config's lock as `shardmill lock` does, and return a line that says so. Raises CheckpointError.

    Entries of what the config no longer names go. Unless `upgrade`, entries of what it still names stay as they are.

    Raises:
        ConfigError: the lock is damaged, or can't be written.
    """
    wanted = [(str(source.repo), source.revision or MAIN) for source in config.sources if floats(source)]
    if not wanted:
        what = "a folder" if config.source.path else "a pinned commit"
        return f"{file}: needs no lock, its source is {what}"
    path = lock_of(file, config.model)
    lock = {} if upgrade else read_lock(path)
    entries = [lock.get(key) or resolved(*key) for key in wanted]
    if len(lock) == len(entries) and all(entry == lock.get(key) for key, entry in zip(wanted, entries, strict=True)):
        return f"{path}: holds {', '.join(entry.said for entry in entries)}; --upgrade asks for newer commits"
    return write_lock(path, entries, keep_others=False)


def announce(configs: Iterable[Config]) -> None:
    """Say in a line each which commits were resolved without a lock."""
    for config in configs:
        for entry in fresh(config):
            say(f"{entry.said}; not locked yet, a build or `shardmill lock` writes {lock_path(config)}")


def keep(configs: Iterable[Config]) -> None:
    """Write what no lock says yet, and say so in a line for each lock. Raises ConfigError."""
    for config in configs:
        new = list(fresh(config))
        if new:
            say(write_lock(lock_path(config), new))


def lock_path(config: Config) -> Path:
    """Return the lock of a config that has one."""
    return Path(next(source.lock for source in config.sources if is_locked(source)))


def say(line: str) -> None:
    """Print a line of what was written; nothing for an empty one."""
    if line:
        print(f"shardmill: {line}", file=sys.stderr)


def write_lock(path: Path, entries: Sequence[Locked], keep_others: bool = True) -> str:
    """Write entries into a lock, and return a line that says so; empty if the lock has them already.

    Args:
        path: the lock; another of its name in the working folder takes its place where it can't be written.
        entries: what is written.
        keep_others: whether the lock's other entries stay, and an entry that another run has written meanwhile counts.

    Raises:
        ConfigError: the lock can't be written, or another run has locked something else.
    """
    with _alone(path.parent):
        known = read_lock(path) if keep_others else {}
        for entry in entries:
            other = known.get((entry.repo, entry.revision), entry)
            if other != entry:
                raise ConfigError(f"{path}: another run has meanwhile locked {other.said}; run the same command again")
        wanted = known | {(entry.repo, entry.revision): entry for entry in entries}
        if wanted == known:
            return ""
        written = _written(path, {"version": VERSION, "sources": [_row(wanted[key]) for key in sorted(wanted)]})
    return f"wrote {written}: {', '.join(entry.said for entry in entries)}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time read and write locks in a folder, where its file system can tell processes apart."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _row(entry: Locked) -> dict[str, Any]:
    files = {name: {"size": size, "digest": digest} for name, size, digest in entry.files}
    return {"repo": entry.repo, "revision": entry.revision, "commit": entry.commit, "files": files}


def _written(path: Path, content: Any) -> Path:
    """Write a lock where it belongs or, failing that, in the working folder; return where."""
    here = Path(path.name)
    try:
        write_json(Path(os.path.realpath(path)) if path.is_symlink() else path, content)  # a link stays
    except OSError as error:
        if path == here or path.exists():  # the one that is there is the one that would be read
            why = f"can't be written ({error.strerror}); allow it, or write a commit as source.revision"
            raise ConfigError(f"{path}: {why}") from error
        return _written(here, content)
    return path
