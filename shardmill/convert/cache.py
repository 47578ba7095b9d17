"""A folder in which converted programs are kept between processes: each is made once, and is whole or made again."""

from __future__ import annotations

import fcntl
import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill.files import digest, load_json, write_json


def cached(folder: Path, kind: Any, make: Callable[[], bytes]) -> bytes:
    """Return the program of a kind, from the folder or from `make`.

    Args:
        folder: a folder for programs that the present tools make.
        kind: the kind, as plain data.
        make: makes the program if the folder lacks it.
    """
    file = folder / f"{digest(kind)}.json"
    program = read_program(file)
    if program is None:
        with _locked(file.with_suffix(".lock")):
            program = read_program(file)
            if program is None:
                program = make()
                write_json(file, {"sha256": _checksum(program), "program": b64encode(program).decode()})
    return program


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock that ends with its process, and wait for it as long as it takes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def read_program(file: Path) -> bytes | None:
    """Return the program in a file; None if the file is missing or damaged."""
    try:
        content = load_json(file)
        program = b64decode(content["program"])
        return program if content["sha256"] == _checksum(program) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(program: bytes) -> str:
    """Return sha256 of a program, to show whether it is whole."""
    return hashlib.sha256(program).hexdigest()
