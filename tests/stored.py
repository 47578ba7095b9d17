"""A piece of work for the store, and what it leaves in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from shardmill.checkpoint.hashing import tree_hash
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action

Made = Mapping[str, Path]


def write_both(made: Made) -> None:
    """A file and a folder."""
    made["file"].write_text("content")
    (made["folder"] / "deep").mkdir(parents=True)
    (made["folder"] / "deep" / "data.bin").write_bytes(b"\x00\x01")


def never(made: Made) -> None:
    raise AssertionError("this is work")


class Outcome:
    """What one call made, under a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.receipt = folder, folder / "a.receipt.json"
        self.outputs = {"file": folder / "a.json", "folder": folder / "a.mlpackage"}

    def perform(self, shop: Store, work: Callable[[Made], None] = write_both, **key: object) -> bool:
        return shop.perform(Action("step", **key), self.outputs, self.receipt, work)  # type: ignore[arg-type]

    def hashes(self) -> dict[str, str]:
        return {name: tree_hash(path) for name, path in self.outputs.items()}

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()


def entry(shop: Store, **key: object) -> Path:
    return shop.root / Action("step", **key).key  # type: ignore[arg-type]
