"""Loads the programs of a build one after the other, so that the system knows them before anybody waits.

A Mac specialises a program for its chip when it is first loaded, which takes minutes for a large one, and keeps the
result for as long as system and program stay the same. How much it keeps of widths other than the default one, it does
not say; every width is run once all the same. Which programs were loaded is noted in the user's cache by the bytes of
each, with chip and system, so that a run that was stopped goes on with the rest. The portable engine keeps nothing:
there the note only says what was loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardmill import machine
from shardmill.errors import UnreadableError
from shardmill.files import cache_folder, digest, read_json, write_json
from shardmill.runtime.bundles import loadable
from shardmill.runtime.engine import load_program
from shardmill.runtime.loading import reshaping
from shardmill.runtime.manifest import ENCODER, MARK, RUNTIME, holds_encoder, read_manifest, reshape_frequency

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Warmed:
    """A program that is warm.

    Attributes:
        name: the part's.
        place: its number, from 1 on.
        of: how many there are.
        seconds: what its load and its first passes took; None where an earlier run has loaded it.
        left: seconds that the rest may take, by bytes of weights.
    """

    name: str
    place: int
    of: int
    seconds: float | None
    left: float


def warm(build: Path, precision: str, again: bool = False) -> Iterator[Warmed]:
    """Loads each program, runs it once at every width, and lets it go.

    Args:
        build: folder of a finished build.
        precision: the portable engine's; Core ML has no choice.
        again: whether programs that an earlier run has loaded are loaded too.

    Yields:
        Each program once it is warm.

    Raises:
        ShardmillError: the folder holds no finished build, or a program can't be loaded.
    """
    manifest = loadable(read_manifest(build, ENCODER if holds_encoder(build) else RUNTIME), build)
    parts, note, reshape = manifest["parts"], _note(), reshape_frequency(manifest)
    known = {} if again else _known(note)
    sizes = [_bytes(build, part) for part in parts]
    spent, loaded = 0.0, 0
    with machine.load_programs_as(precision):
        for place, part in enumerate(parts):
            key, seconds = _identity(part, reshape), None
            if key not in known:
                start = time.perf_counter()
                with reshaping(reshape):
                    _run_once(build, part, _widths(manifest, place), manifest.get("context", 0))
                seconds = time.perf_counter() - start
                spent, loaded = spent + seconds, loaded + sizes[place]
                _note_down(note, {**_known(note), key: part["name"]})
            todo = sum(size for other, size in zip(parts, sizes, strict=True) if _identity(other, reshape) not in known)
            left = spent * max(todo - loaded, 0) / loaded if loaded else 0.0
            yield Warmed(part["name"], place + 1, len(parts), seconds, left)


def _run_once(build: Path, part: Mapping[str, Any], widths: list[int], context: int) -> None:
    """Loads a program and runs it on zeros at every width, in each of its contexts."""
    program = load_program(build, part, context)
    for slots in program.lengths or (context,):
        program.move(slots, keep=False)
        inputs = part["inputs"] | part.get("contexts", {}).get(str(slots), {}).get("inputs", {})
        for width in widths:
            shapes = {name: [width if size == "T" else size for size in shape] for name, shape in inputs.items()}
            program({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def _widths(manifest: Mapping[str, Any], place: int) -> list[int]:
    """The widths that a part is run at: all, or of an encoder's its bucket."""
    return [manifest[MARK][place]] if MARK in manifest else list(manifest["widths"])


def _identity(part: Mapping[str, Any], reshape: str) -> str:
    """Return what must be the same for a program to be known: its bytes, what loads it, and with which hint."""
    program = part["program"]
    known = {"program": program.get("files", program["path"]), "engine": machine.engine()}
    return digest(known | ({"reshape_frequency": reshape} if reshape else {}))


def _bytes(build: Path, part: Mapping[str, Any]) -> int:
    return sum(file.stat().st_size for file in (build / part["program"]["path"]).rglob("*") if file.is_file())


def _known(note: Path) -> dict[str, str]:
    """What earlier runs have loaded; losing the note costs time only."""
    try:
        found = read_json(note)
    except UnreadableError:
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _note_down(note: Path, known: Mapping[str, str]) -> None:
    try:
        write_json(note, known)
    except OSError as error:  # what was loaded is loaded all the same
        log.warning("%s: can't be written (%s); the next run loads all programs again", note, error.strerror)


def _note() -> Path:
    return cache_folder() / "warm.json"
