"""Loads the programs of a build one after the other, so that the system specialises them before anybody waits.

Core ML specialises a program for the chip when a process first loads it, and again for each new shape at its first
pass; for a large program this takes minutes. Apple does not document how much of this the system keeps for the next
process (docs/on-a-mac.md lists observations). So every program is loaded and run at every width in each run, however
often that was done before. A note in the user's cache records the time of the first load, by the program's bytes, chip
and system. If a later load is much faster, the system has kept something; if not, warming is useless. The portable
engine keeps nothing.
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
from shardmill.errors import LoadError, UnreadableError
from shardmill.files import cache_folder, digest, read_json, write_json
from shardmill.runtime.bundles import loadable, program_bytes, reshaping
from shardmill.runtime.manifest import (
    ENCODER,
    MARK,
    RUNTIME,
    bucket_of,
    holds_encoder,
    part_in,
    read_manifest,
    reshape_frequency,
)
from shardmill.runtime.program import Program

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Warmed:
    """A program that is warm.

    Attributes:
        name: the part's name.
        place: the program's number, counted from 1.
        of: the number of programs.
        seconds: time of this load and its first passes.
        first: time of the first load here, in an earlier run; None if this is the first.
        left: estimated seconds for the programs that were never loaded, by bytes of weights.
    """

    name: str
    place: int
    of: int
    seconds: float
    first: float | None
    left: float


def warm_programs(build: Path, precision: str) -> Iterator[Warmed]:
    """Load each program, run it once at every width, and unload it.

    Args:
        build: folder of a finished build.
        precision: the portable engine's precision; ignored on Core ML.

    Yields:
        Each program when it is warm.

    Raises:
        ShardmillError: the folder is not a finished build, or a program can't be loaded.
    """
    manifest = loadable(read_manifest(build, ENCODER if holds_encoder(build) else RUNTIME), build)
    parts, note, reshape = manifest["parts"], cache_folder() / "warm.json", reshape_frequency(manifest)
    known = _known(note)
    sizes = [program_bytes(build, part) for part in parts]
    spent, loaded = 0.0, 0
    with machine.load_programs_as(precision):
        for place, part in enumerate(parts):
            key, start = _identity(part, reshape), time.perf_counter()
            widths = [bucket_of(manifest, part)] if MARK in manifest else manifest["widths"]
            try:
                with reshaping(reshape):
                    _run_once(build, part, widths, manifest.get("context", 0))
            except LoadError as error:
                raise error.of(build) from error
            seconds = time.perf_counter() - start
            if key not in known:
                spent, loaded = spent + seconds, loaded + sizes[place]
                _note_down(note, {**_known(note), key: seconds})
            todo = sum(size for other, size in zip(parts, sizes, strict=True) if _identity(other, reshape) not in known)
            left = spent * max(todo - loaded, 0) / loaded if loaded else 0.0
            yield Warmed(part["name"], place + 1, len(parts), seconds, known.get(key), left)


def _run_once(build: Path, part: Mapping[str, Any], widths: list[int], context: int) -> None:
    """Load a program and run it on zeros at every width, in each of its contexts."""
    program = Program(build / part["program"]["path"], part, context)
    for slots in program.lengths or (context,):
        program.move(slots, keep=False)
        inputs = part_in(part, slots)["inputs"].items()
        for width in widths:
            shapes = {name: [width if size == "T" else size for size in shape] for name, shape in inputs}
            program({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def _identity(part: Mapping[str, Any], reshape: str) -> str:
    """Return a digest that identifies a program: its bytes, the engine that loads it, and the hint."""
    program = part["program"]
    known = {"program": program.get("files", program["path"]), "engine": machine.engine()}
    return digest(known | ({"reshape_frequency": reshape} if reshape else {}))


def _known(note: Path) -> dict[str, float]:
    """Return the seconds of each program's first load; empty if the note can't be read."""
    try:
        noted = read_json(note)
    except UnreadableError:
        return {}
    content = noted.items() if isinstance(noted, dict) else ()
    return {key: float(seconds) for key, seconds in content if isinstance(seconds, int | float)}


def _note_down(note: Path, known: Mapping[str, float]) -> None:
    try:
        write_json(note, known)
    except OSError as error:  # the programs are loaded nevertheless
        log.warning("%s: can't be written (%s); the next run can't compare its times", note, error.strerror)
