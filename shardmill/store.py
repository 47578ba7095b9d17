"""The second layer of caching: a step decides by content whether there is work to do.

An action's key is the sha256 of its inputs' content hashes, its parameters, the code it uses and the versions of the
packages that decide its bytes. What was made for a key lies in `<store>/<key>/` and is linked into place on a hit,
without importing anything heavy. Every entry and every output appears by atomic rename, and an entry is compared with
its recorded hashes before it is used; one that does not match is dropped and made again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardmill import canonical
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import tree_hash

log = logging.getLogger(__name__)

ENTRY = "entry.json"
Work = Callable[[Mapping[str, Path]], None]


@dataclass(frozen=True)
class Action:
    """One piece of work and all that decides its result."""

    step: str
    inputs: Mapping[str, str] = field(default_factory=dict)  # name -> content hash
    params: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The action's name in the store."""
        return canonical.digest(asdict(self))


class Store:
    """`build/.store`, shared by all models."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hashes = HashCache(root / "hashes.sqlite")

    def perform(self, action: Action, outputs: Mapping[str, Path], receipt: Path, work: Work, **notes: Any) -> bool:
        """Makes `outputs` (name -> path of a file or folder) and the receipt; True if that took work.

        `work` gets a path to write to for each name. `notes` go into the receipt (the engine, say).
        """
        key = action.key
        entry = self.root / key
        worked = not self.intact(entry)
        if worked:
            log.info("worked: %s", self.reason(action, receipt))
            self.make(entry, outputs, work)
        else:
            log.info("unchanged: %s", key[:12])
        recorded = {name: made["sha256"] for name, made in json.loads((entry / ENTRY).read_text()).items()}
        for name, path in outputs.items():
            place(entry / stored(name, path), path)
        canonical.write_json(receipt, {**asdict(action), "key": key, "outputs": recorded, **notes})
        canonical.write_json(self.last(receipt), asdict(action))
        return worked

    def make(self, entry: Path, names: Mapping[str, Path], work: Work) -> None:
        """Runs `work` in a scratch folder and turns that into the entry."""
        self.root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.root))
        try:
            made = {name: scratch / stored(name, path) for name, path in names.items()}
            work(made)
            for file in scratch.rglob("*"):
                if file.is_file() and not file.is_symlink():
                    file.chmod(0o444)  # builds share these bytes: nobody may edit them in place
            recorded = {name: {"sha256": tree_hash(path), "file": path.name} for name, path in made.items()}
            canonical.write_json(scratch / ENTRY, recorded)
            if entry.exists():  # damaged, or made by another process meanwhile
                shutil.rmtree(entry)
            with suppress(OSError):
                os.rename(scratch, entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def intact(self, entry: Path) -> bool:
        """Whether the entry exists and every output in it still has the hash it was recorded with."""
        try:
            recorded = json.loads((entry / ENTRY).read_text())
            return all(tree_hash(entry / made["file"], self.hashes) == made["sha256"] for made in recorded.values())
        except FileNotFoundError:
            return False
        except (OSError, ValueError):
            log.warning("damaged entry %s: made again", entry.name[:12])
            return False

    def last(self, receipt: Path) -> Path:
        """Where the last action for a receipt is remembered (Snakemake removes the receipt before the job)."""
        return self.root / "last" / f"{canonical.digest(os.path.relpath(receipt, self.root))[:32]}.json"

    def reason(self, action: Action, receipt: Path) -> str:
        """Why there is work: the ingredients of the key that differ from the last time."""
        try:
            before = json.loads(self.last(receipt).read_text())
        except (OSError, ValueError):
            return "not made before"
        return ", ".join(differences(before, json.loads(canonical.dumps(asdict(action))))) or "its entry is gone"


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the leaves in which two actions differ."""
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name}")
    return found


def stored(name: str, path: Path) -> str:
    """An output's name in its entry; it keeps the suffix, by which libraries tell what to write."""
    return name + path.suffix


def place(source: Path, target: Path) -> None:
    """Puts a stored file or folder at `target`, by hard links where the file system has them."""
    with canonical.replacing(target) as temporary:
        if source.is_dir():
            shutil.copytree(source, temporary, copy_function=link, symlinks=True)
        else:
            link(str(source), str(temporary))


def link(source: str, target: str) -> None:
    """A hard link, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def read_receipt(path: Path) -> dict[str, Any]:
    """A receipt's content."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content
