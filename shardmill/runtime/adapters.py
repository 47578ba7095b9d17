"""The adapters of a build, as an engine puts them into its programs.

An adapter NAME lies in the build's folder `adapters/NAME`: adapter.safetensors holds the inputs of the programs as
models/adapters.py lays them out, each in fp16 and called PART.INPUT, and adapter.json is the receipt. The receipt names
the base by a digest of the packages, so an adapter is never used with other weights or with another form of programs.
runtime/adding.py makes these files.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import AdapterError, UnreadableError
from shardmill.files import digest, read_sealed
from shardmill.printable import printable
from shardmill.runtime.adapter_inputs import Halves

FOLDER, RECEIPT, TENSORS = "adapters", "adapter.json", "adapter.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class AdapterInfo:
    """A build's adapter, in short.

    Attributes:
        rank: the largest rank of its matrices.
        modules: how many modules it changes.
        base: the base model's repository, as the adapter has it; "" if it names a folder.
    """

    name: str
    rank: int
    modules: int
    base: str


def adapter_rank(manifest: Mapping[str, Any]) -> int:
    """Return the largest rank of adapters that a build's programs take; 0 if they take none."""
    return int(manifest.get("adapters", 0))


def base_digest(manifest: Mapping[str, Any]) -> str:
    """Return a digest of the packages of the programs that take an adapter."""
    taking = [part["name"] for part in manifest["parts"] if "adapters" in part]
    return digest({name: manifest["packages"][name]["files"] for name in taking})


def adapter_names(build: Path) -> list[str]:
    """Return the names of a build's adapters, sorted."""
    names = (file.parent.name for file in (build / FOLDER).glob(f"*/{RECEIPT}"))
    return sorted(name for name in names if NAME.fullmatch(name))


def adapters_of(build: Path) -> list[AdapterInfo]:
    """Return the adapters of a build by name. Raises ShardmillError for a damaged receipt."""
    receipts = (_receipt(build, name) for name in adapter_names(build))
    return [AdapterInfo(**{key: one[key] for key in ("name", "rank", "modules", "base")}) for one in receipts]


def recorded_files(build: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each file of an adapter, its sha256 and the receipt that names it; of a damaged receipt, nothing."""
    for name in adapter_names(build):
        receipt = f"{FOLDER}/{name}/{RECEIPT}"
        with suppress(AdapterError):
            content = _receipt(build, name)
            yield receipt, hash_file(build / receipt), receipt
            yield f"{FOLDER}/{name}/{TENSORS}", content["sha256"], receipt


def remove_adapter(build: Path, name: str) -> None:
    """Remove an adapter of a build. Raises AdapterError if the build has no adapter of that name."""
    _receipt(build, name)
    shutil.rmtree(build / FOLDER / name)


def adapter_digest(build: Path, name: str) -> str:
    """Return the sha256 of an adapter's inputs, as its receipt has it. Raises AdapterError, see `load_adapter`."""
    return str(_receipt(build, name).get("sha256"))


def load_adapter(build: Path, manifest: Mapping[str, Any], name: str) -> dict[str, dict[str, Halves]]:
    """Return the inputs of an adapter by part and by name, each [1, n, rows, width].

    Raises:
        AdapterError: if the build has no adapter of that name, or it is damaged, or was made for another base.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    receipt, file, again = _receipt(build, name), build / FOLDER / name / TENSORS, "add it again"
    if receipt.get("base_digest") != base_digest(manifest):
        raise AdapterError(f"{file.parent}: was made for other programs than {build} has now; {again}")
    try:
        content = file.read_bytes()  # once, as `adapter remove` or `adapter add` may run meanwhile
        if hashlib.sha256(content).hexdigest() != receipt.get("sha256"):
            raise AdapterError(f"{file}: is not the file that was added; {again}")
        tensors = load(content)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} can't be read: {error}; {again}") from error
    inputs: dict[str, dict[str, Halves]] = {}
    for part in manifest["parts"]:
        for one in part.get("adapters", {}):
            inputs.setdefault(part["name"], {})[one] = tensors[f"{part['name']}.{one}"]
    return inputs


def check_adapter(build: Path, manifest: Mapping[str, Any], name: str) -> None:
    """Raise AdapterError if a build has no adapter of that name, before any program is loaded."""
    if not adapter_rank(manifest):
        raise AdapterError(
            f"{build}: its programs take no adapters; set `program.adapters` in its config and build again"
        )
    _receipt(build, name)


def _receipt(build: Path, name: str) -> dict[str, Any]:
    """Return an adapter's receipt. Raises AdapterError if it is missing or damaged."""
    file = build / FOLDER / name / RECEIPT
    if not NAME.fullmatch(name) or not file.is_file():
        has = f"it has {', '.join(adapter_names(build)) or 'none'}"
        raise AdapterError(f"{build}: no adapter is called {printable(name)!r}; {has} (`shardmill adapter add`)")
    try:
        return read_sealed(file)
    except UnreadableError as error:
        raise AdapterError(f"{error}; add the adapter again") from error
