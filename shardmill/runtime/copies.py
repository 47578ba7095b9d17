"""Copies of what programs keep for a text, in memory and in a file that a later process reads.

A file is a cache: it holds the digest of its content, and of all that decides the content. Whoever finds another digest
computes the text again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill import machine
from shardmill.errors import ShardmillError
from shardmill.files import check, digest, dumps, parse_json, replacing

Arrays = dict[str, NDArray[Any]]
ABOUT = "about"  # the file's one entry of metadata
PACKAGES = ("coremltools", "numpy", "torch")


@dataclass(frozen=True)
class Copy:
    """A copy of what the programs keep for some positions of a text, and perhaps for what follows them.

    Attributes:
        start, stop: the positions; each had the slot of its number.
        rows: by program and cache, the rows of these positions.
        taps: the rows of these positions that a drafter reads.
        rest: by program and cache, the content of the caches that have no slot for each position, after `stop`
            positions.
        rings: the positions in the slots of rings, see `KVLayout.rings`; None if `rest` was not copied.
        shifts: of what follows each position, see `HeldRows.shifts`; None if no picture came before, as in a file.
    """

    start: int
    stop: int
    rows: dict[tuple[int, str], NDArray[np.floating]]
    taps: NDArray[np.float16]
    rest: dict[tuple[int, str], NDArray[np.floating]]
    rings: Mapping[str, NDArray[np.int64]] | None
    shifts: NDArray[np.int64] | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return self.taps.nbytes + sum(array.nbytes for array in (*self.rows.values(), *self.rest.values()))


def save_copies(copies: Sequence[Copy], file: Path, identity: str) -> None:
    """Write copies to a file.

    Args:
        copies: the copies.
        file: the file, which is replaced.
        identity: a digest of all that decides the copies.

    Raises:
        OSError: the file can't be written.
    """
    from safetensors.numpy import save_file

    arrays: Arrays = {}
    for place, copy in enumerate(copies):
        arrays[f"{place}/taps"] = copy.taps
        for kind, caches in (("rows", copy.rows), ("rest", copy.rest)):
            arrays |= {f"{place}/{kind}/{program}/{name}": array for (program, name), array in caches.items()}
        arrays |= {f"{place}/rings/{name}": array for name, array in (copy.rings or {}).items()}
    spans = [[copy.start, copy.stop] for copy in copies]
    about = {"identity": identity, "sha256": _content_digest(arrays, spans), "spans": spans}
    with replacing(file) as new:
        save_file(arrays, new, {ABOUT: dumps(about)})


def load_copies(file: Path, identity: str) -> list[Copy]:
    """Return the copies in a file.

    Raises:
        FileNotFoundError: there is no file.
        ShardmillError: the file is damaged, or something else decided its copies.
    """
    from safetensors import SafetensorError, safe_open

    check(file)
    try:
        with safe_open(file, "np") as opened:
            about = parse_json((opened.metadata() or {})[ABOUT])
            arrays: Arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        whole = about["sha256"] == _content_digest(arrays, about["spans"])
        known = about["identity"] == identity
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ShardmillError(f"{file}: damaged ({error})") from error
    if not whole:
        raise ShardmillError(f"{file}: damaged (not what was written)")
    if not known:
        raise ShardmillError(f"{file}: made by another engine or version")
    return [_copy(start, stop, _below(arrays, str(place))) for place, (start, stop) in enumerate(about["spans"])]


def engine_identity(precision: str) -> str:
    """Return a digest of all that decides what programs keep, beside the model and the text."""
    code = hashlib.sha256()
    for name in machine.CODE:
        spec = find_spec(name)
        for folder in spec.submodule_search_locations or () if spec else ():
            for file in sorted(Path(folder).rglob("*.py")):
                code.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest(
        {
            "code": code.hexdigest(),
            "engine": machine.engine(),
            "machine": machine.machine(),
            "packages": machine.package_versions(PACKAGES),
            "precision": precision,
        }
    )


def _copy(start: int, stop: int, arrays: Arrays) -> Copy:
    rows, rest = (_by_program(_below(arrays, kind)) for kind in ("rows", "rest"))
    return Copy(start, stop, rows, arrays["taps"], rest, _below(arrays, "rings") or None)


def _by_program(arrays: Arrays) -> dict[tuple[int, str], NDArray[Any]]:
    named = ((*name.partition("/"), array) for name, array in arrays.items())
    return {(int(program), cache): array for program, _, cache, array in named}


def _below(arrays: Arrays, folder: str) -> Arrays:
    """Return the arrays whose names begin with a folder, without it."""
    return {name.removeprefix(f"{folder}/"): array for name, array in arrays.items() if name.startswith(f"{folder}/")}


def _content_digest(arrays: Arrays, spans: Sequence[Sequence[int]]) -> str:
    heads = [[name, str(arrays[name].dtype), arrays[name].shape] for name in sorted(arrays)]
    hasher = hashlib.sha256(dumps([spans, heads]).encode())
    for name in sorted(arrays):
        hasher.update(arrays[name].tobytes())
    return hasher.hexdigest()
