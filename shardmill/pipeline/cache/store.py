"""The second layer of caching: a step decides by content whether there is work to do.

An action's key is the sha256 of its inputs' content hashes, its parameters, the code it uses and the versions of the
packages that decide its bytes. The result for a key lies in `<store>/<key>/` and is linked into place on a hit,
without importing anything heavy. Every entry and every output appears by atomic rename. Before an output is put into
place, it is hashed and compared with the record; an entry that does not match is dropped and made again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import digest, dumps, parse_json, read_json, sealed, write_json
from shardmill.pipeline.cache import entry as cache_entry
from shardmill.pipeline.cache import remote
from shardmill.pipeline.cache.entry import (
    ENTRY,
    STAMPS,
    adopt,
    entry_description,
    files_of,
    hashes_of,
    intact,
    output_files,
    read_entry,
    restored,
    scratch_folder,
    stamps,
    stored,
)
from shardmill.pipeline.cache.remote import Remote
from shardmill.pipeline.task import Action, Work, paths_from

log = logging.getLogger(__name__)

LAST = ".last"  # the folder beside the store that keeps the last action of each receipt
TEMPLATES = "templates"  # the folder with conversion results that all parts share
TRAINING = "training"  # the folder with the progress of training, and with the texts that heads learn from


def _nothing() -> None:
    """Do nothing."""


class Store:
    """`build/.store`, shared by all models.

    Args:
        root: the folder.
        before_change: called before an output gets, or may get, another content than the last time.
        before_keeping: called before a result is kept; it may raise.
        shared: a store of several machines: entries that are missing here are taken from it, new ones are sent to it.
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
        """Make `outputs` and the receipt; return True if work was needed.

        Args:
            action: what decides the result.
            outputs: by name, the path of a file or folder.
            receipt: the file that records the inputs and the outputs.
            work: gets a path to write to for each name.
            reads: artifacts that the work reads, with their receipts, whose hashes are in the action.
            notes: further entries of the receipt (the engine, for instance).

        Raises:
            ShardmillError: an artifact to be read differs from its receipt.
        """
        entry = self.root / action.key
        answer = remote.pull(None if intact(entry) else self.shared, entry, partial(self.fill, entry, outputs))
        if not intact(entry) or self.changes(action, receipt) != []:
            self.before_change()
        worked = not (intact(entry) and restored(entry, outputs))
        if worked:
            log.info("worked: %s", self.reason(action, receipt))
            _check_artifacts(reads or {})
            self.make(entry, outputs, work)
            if not restored(entry, outputs):
                raise ShardmillError(f"{entry}: not what was just written; check this disk, then run again")
            remote.push(self.shared, entry, output_files(entry), answer)
        else:
            log.info("unchanged")
        write_receipt(receipt, action, read_entry(entry), outputs, notes)
        write_json(self.last(receipt), asdict(action))
        return worked

    def make(self, entry: Path, names: Mapping[str, Path], work: Work) -> None:
        """Run `work`, and keep the result as the entry."""

        def checked(made: Mapping[str, Path]) -> None:
            work(made)
            self.before_keeping()

        self.fill(entry, names, checked)

    def fill(self, entry: Path, names: Mapping[str, Path], work: Work) -> None:
        """Run `work` in a scratch folder and make that folder the entry."""
        with scratch_folder(self.root) as scratch:
            made = {name: scratch / stored(name, path) for name, path in names.items()}
            work(made)
            for file in files_of(scratch):
                file.chmod(0o444)  # builds share these bytes: nobody may edit them in place
            records = {name: entry_description(path) for name, path in made.items()}
            cache_entry.share(
                self.root, {f: sha for name, path in made.items() for f, sha in hashes_of(path, records[name])}
            )
            write_json(scratch / ENTRY, records)
            write_json(scratch / STAMPS, stamps(scratch))
            adopt(scratch, entry)

    def last(self, receipt: Path) -> Path:
        """Return where the last action for a receipt is remembered (Snakemake removes the receipt before the job)."""
        return self.root.parent / LAST / f"{digest(os.path.relpath(receipt, self.root))[:32]}.json"

    def changes(self, action: Action, receipt: Path) -> list[str] | None:
        """Return the ingredients of the key that changed since the last time; None if there was no last time."""
        try:
            before = read_json(self.last(receipt))
        except UnreadableError:
            return None
        return key_differences(before, parse_json(dumps(asdict(action))))

    def reason(self, action: Action, receipt: Path) -> str:
        """Return the reason for work: the ingredients of the key that changed since the last time."""
        changes = self.changes(action, receipt)
        return "not made before" if changes is None else ", ".join(changes) or "its entry is gone or damaged"


def key_differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return dotted names of the leaves in which two actions differ."""
    names = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += key_differences(old, new, f"{prefix}{name}.")
        elif old != new:
            names.append(f"{prefix}{name}")
    return names


def write_receipt(
    receipt: Path, action: Action, made: Mapping[str, Any], outputs: Mapping[str, Path], notes: Mapping[str, Any]
) -> None:
    """Write a receipt, which records the inputs and the outputs of a job.

    Args:
        receipt: the file to write.
        action: the work and all that decides its result.
        made: the record of each output.
        outputs: the path of each output.
        notes: further entries of the receipt.
    """
    hashes = {
        "outputs": {name: one["sha256"] for name, one in made.items()},
        "files": {name: one["files"] for name, one in made.items() if one["files"]},
        "paths": paths_from(receipt, outputs),
    }
    write_json(receipt, sealed({**asdict(action), "key": action.key, **hashes, **notes}))


def _check_artifacts(receipts: Mapping[Path, Path]) -> None:
    """Raise ShardmillError if an artifact differs from its receipt.

    Otherwise results made from the damaged artifact would be stored under the key of the sound one.
    """
    for artifact, receipt in receipts.items():
        made = read_json(receipt)
        ((name, sha),) = made["outputs"].items()
        files = {artifact / file: inner for file, inner in made["files"].get(name, {}).items()} or {artifact: sha}
        if any(not file.is_file() or hash_file(file) != expected for file, expected in files.items()):
            raise ShardmillError(f"{artifact}: not the bytes that were made; remove it and build again")
