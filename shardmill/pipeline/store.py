"""The second layer of caching: a step decides by content whether there is work to do.

An action's key is the sha256 of its inputs' content hashes, its parameters, the code it uses and the versions of the
packages that decide its bytes. What was made for a key lies in `<store>/<key>/` and is linked into place on a hit,
without importing anything heavy. Every entry and every output appears by atomic rename, and what is linked into place
is hashed and compared with the record first; an entry that does not match is dropped and made again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file, tree_hashes
from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import digest, dumps, parse_json, read_json, replacing, sealed, write_json
from shardmill.pipeline import blobs, exchange
from shardmill.pipeline.ingredients import differences
from shardmill.pipeline.lock import using_store
from shardmill.pipeline.remote import Remote
from shardmill.pipeline.scratch import aside, scratch_folder
from shardmill.pipeline.task import Action, Work, paths_from
from shardmill.pipeline.users import register

log = logging.getLogger(__name__)

ENTRY, STAMPS = "entry.json", "stamps.json"
LAST = ".last"  # the folder beside the store in which builds remember what they did
TEMPLATES = "templates"  # the folder in which stamped conversion keeps what all parts share


def _nothing() -> None:
    """Nobody is told."""


class Store:
    """`build/.store`, shared by all models.

    Args:
        root: the folder.
        before_change: called before an output gets, or may get, another content than the last time.
        before_keeping: called before what was made is kept; it may raise.
        shared: a store of several machines, which is asked for what is not here and told what is made here.
    """

    def __init__(
        self,
        root: Path,
        before_change: Callable[[], None] = _nothing,
        before_keeping: Callable[[], None] = _nothing,
        shared: Remote | None = None,
    ) -> None:
        self.root, self.shared = root, shared
        self.before_change, self.before_keeping = before_change, before_keeping
        self.hashes = HashCache(root / "hashes.sqlite")

    def perform(
        self,
        action: Action,
        outputs: Mapping[str, Path],
        receipt: Path,
        work: Work,
        reads: Mapping[Path, Path] | None = None,
        **notes: Any,
    ) -> bool:
        """Makes `outputs` and the receipt; True if that took work.

        Args:
            action: what decides the result.
            outputs: by name, the path of a file or folder.
            receipt: where to say what was made from what.
            work: gets a path to write to for each name.
            reads: artifacts that the work reads, with the receipts by whose hashes the action knows them.
            notes: what else the receipt should say (the engine, for instance).

        Raises:
            ShardmillError: An artifact to be read is not the one that was made.
        """
        with using_store(self.root):
            with contextlib.suppress(OSError):  # a store that may only be read: its owner's gc does not know of us
                register(self.root)
            entry = self.root / action.key
            answer = exchange.ask(None if intact(entry) else self.shared, entry, partial(self.fill, entry, outputs))
            if not intact(entry) or self.changes(action, receipt) != []:
                self.before_change()
            worked = not (intact(entry) and restored(entry, outputs))
            if worked:
                log.info("worked: %s", self.reason(action, receipt))
                _check_artifacts(reads or {})
                self.make(entry, outputs, work)
                if not restored(entry, outputs):
                    raise ShardmillError(f"{entry}: not what was just written; check this disk, then run again")
                exchange.offer(self.shared, entry, _output_files(entry), answer)
            else:
                log.info("unchanged")
            write_receipt(receipt, action, read_entry(entry), outputs, notes)
            write_json(self.last(receipt), asdict(action))
        return worked

    def make(self, entry: Path, names: Mapping[str, Path], work: Work) -> None:
        """Works, and keeps the result as the entry."""

        def checked(made: Mapping[str, Path]) -> None:
            work(made)
            self.before_keeping()

        self.fill(entry, names, checked)

    def fill(self, entry: Path, names: Mapping[str, Path], work: Work) -> None:
        """Runs `work` in a scratch folder and turns that into the entry."""
        with scratch_folder(self.root) as scratch:
            made = {name: scratch / stored(name, path) for name, path in names.items()}
            work(made)
            for file in _files_of(scratch):
                file.chmod(0o444)  # builds share these bytes: nobody may edit them in place
            records = {name: described(path) for name, path in made.items()}
            blobs.share(self.root, {f: sha for name, path in made.items() for f, sha in _hashes(path, records[name])})
            write_json(scratch / ENTRY, records)
            write_json(scratch / STAMPS, stamps(scratch))
            _adopt(scratch, entry)

    def last(self, receipt: Path) -> Path:
        """Where the last action for a receipt is remembered (Snakemake removes the receipt before the job).

        It is the build's, beside the store: others that share the store may have a receipt of the same name.
        """
        return self.root.parent / LAST / f"{digest(os.path.relpath(receipt, self.root))[:32]}.json"

    def changes(self, action: Action, receipt: Path) -> list[str] | None:
        """The ingredients of the key that differ from the last time; None if there was no last time."""
        try:
            before = read_json(self.last(receipt))
        except UnreadableError:
            return None
        return differences(before, parse_json(dumps(asdict(action))))

    def reason(self, action: Action, receipt: Path) -> str:
        """Why there is work: the ingredients of the key that differ from the last time."""
        found = self.changes(action, receipt)
        return "not made before" if found is None else ", ".join(found) or "its entry is gone or damaged"


def _adopt(scratch: Path, entry: Path) -> None:
    """Makes a scratch folder the entry; an intact one that another process made meanwhile stays."""
    if os.path.lexists(entry) and not intact(entry):
        drop(entry)
    try:
        scratch.rename(entry)
    except OSError:
        if not intact(entry):
            raise


def drop(entry: Path) -> None:
    """Removes an entry; nobody ever sees half of it."""
    gone = aside(entry.parent)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        entry.rename(gone)
    if gone.is_dir() and not gone.is_symlink():
        shutil.rmtree(gone, ignore_errors=True)
    else:  # rmtree leaves a link, and waits at a pipe for its writer
        gone.unlink(missing_ok=True)


def intact(entry: Path) -> bool:
    """Whether everything in an entry seems to be what was recorded.

    A file whose size and time of change are those it was made with is believed; any other is hashed. That is enough to
    foretell what a build would do; what a build takes is hashed in any case, see `restored`.
    """
    try:
        recorded = read_entry(entry)
        if stamps(entry) == read_json(entry / STAMPS):
            return True
        same = [described(entry / made["file"]) == made for made in recorded.values()]
        whole = bool(same) and all(same)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ShardmillError):
        whole = False
    if whole:
        with contextlib.suppress(OSError):  # a store that may only be read: hashed again the next time
            write_json(entry / STAMPS, stamps(entry))
    elif entry.exists():
        log.warning("damaged entry %s: not used", entry.name[:12])
    return whole


def restored(entry: Path, outputs: Mapping[str, Path]) -> bool:
    """Puts an entry's files at `outputs`, hashed against the record; drops an entry that is not as recorded.

    A disk that rots changes neither size nor time, so only the bytes tell.
    """
    try:
        recorded = read_entry(entry)
        for name, path in outputs.items():
            place(entry / recorded[name]["file"], path, recorded[name])
    except (FileNotFoundError, ShardmillError, KeyError, TypeError, AttributeError) as error:
        log.warning("damaged entry %s: %s", entry.name[:12], error)
        drop(entry)
        return False
    return True


def described(path: Path) -> dict[str, Any]:
    """What is recorded of an output: its sha256, its name in the entry and, of a folder, each file's sha256."""
    sha, files = tree_hashes(path)
    return {"sha256": sha, "file": path.name, "files": files}


def _hashes(path: Path, recorded: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Each file of an output with its sha256."""
    return [(path / file, sha) for file, sha in recorded["files"].items()] or [(path, recorded["sha256"])]


def read_entry(entry: Path) -> dict[str, dict[str, Any]]:
    """Output name -> what is recorded of it."""
    content: dict[str, dict[str, Any]] = read_json(entry / ENTRY)
    return content


def _output_files(entry: Path) -> dict[str, str]:
    """Path in the entry -> sha256, of every file of its outputs."""
    recorded = read_entry(entry).values()
    hashes = [_hashes(Path(one["file"]), one) for one in recorded]
    return {path.as_posix(): sha256 for pairs in hashes for path, sha256 in pairs}


def _files_of(entry: Path) -> list[Path]:
    """All files of an entry but its stamps, sorted."""
    return sorted(f for f in entry.rglob("*") if f.is_file() and f != entry / STAMPS)


def stamps(entry: Path) -> dict[str, list[int]]:
    """Size and modification time of every file of an entry, its record too. Hard links to it change neither."""
    found = {file.relative_to(entry).as_posix(): file.stat() for file in _files_of(entry)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def stored(name: str, path: Path) -> str:
    """An output's name in its entry; it keeps the suffix, by which libraries tell what to write."""
    return name + path.suffix


def place(source: Path, target: Path, recorded: Mapping[str, Any]) -> None:
    """Puts a stored file or folder at `target`: what is in a folder by hard links where the file system has them.

    A file is copied. Snakemake sets the time of every file that is an output, which through a link would make other
    builds look old, and refuses to make one anew that can't be written, as stored ones can't.
    Raises ShardmillError, with `target` as it was, where the bytes are not those that were recorded.
    """
    with replacing(target) as temporary:
        if source.is_dir():
            shutil.copytree(source, temporary, copy_function=link, symlinks=True)
            for folder, _, _ in os.walk(temporary):
                os.chmod(folder, 0o777 & os.stat(folder).st_mode | 0o700)  # the store's may be read-only
        else:
            shutil.copyfile(source, temporary)
        if tree_hashes(temporary) != (recorded["sha256"], recorded["files"]):
            raise ShardmillError(f"{source.name} is not what was recorded")


def link(source: str, target: str) -> None:
    """A hard link, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_receipt(
    receipt: Path, action: Action, made: Mapping[str, Any], outputs: Mapping[str, Path], notes: Mapping[str, Any]
) -> None:
    """Writes what was made from what.

    Args:
        receipt: the file to write.
        action: the work and all that decides its result.
        made: what is recorded of each output.
        outputs: where they lie.
        notes: what else there is to say.
    """
    hashes = {
        "outputs": {name: one["sha256"] for name, one in made.items()},
        "files": {name: one["files"] for name, one in made.items() if one["files"]},
        "paths": paths_from(receipt, outputs),
    }
    write_json(receipt, sealed({**asdict(action), "key": action.key, **hashes, **notes}))


def _check_artifacts(receipts: Mapping[Path, Path]) -> None:
    """Raises ShardmillError where an artifact is not what its receipt says.

    Else its damage would become part of what is made of it, under the key of the sound one.
    """
    for artifact, receipt in receipts.items():
        made = read_receipt(receipt)
        ((name, sha),) = made["outputs"].items()
        files = {artifact / file: inner for file, inner in made["files"].get(name, {}).items()} or {artifact: sha}
        if any(not file.is_file() or hash_file(file) != expected for file, expected in files.items()):
            raise ShardmillError(f"{artifact}: not the bytes that were made; remove it and build again")


def read_receipt(path: Path) -> dict[str, Any]:
    """A receipt's content."""
    content: dict[str, Any] = read_json(path)
    return content
