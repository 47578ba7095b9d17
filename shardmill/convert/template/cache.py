"""Keeps samples between processes: one makes those of a kind, whoever else needs them at that time waits for it.

The folder is named by the tools that decide the samples, by whoever hands it in. Samples are small (0.2 MB) and belong
to no build.
"""

from __future__ import annotations

import fcntl
import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill.files import digest, load_json, write_json


def shared(cache: Path, kind: Any, make: Callable[[], list[bytes]]) -> list[bytes]:
    """The samples of a kind: those that are kept, else what `make` gives.

    Args:
        cache: a folder for samples that the present tools make.
        kind: plain data.
        make: makes them.
    """
    file = cache / f"{digest(kind)}.json"
    specs = read(file)
    if specs is None:
        with locked(file.with_suffix(".lock")):
            specs = read(file)
            if specs is None:
                specs = make()
                write(file, specs)
    return specs


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Holds a lock that ends with its process, and waits for it as long as it takes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def write(file: Path, specs: list[bytes]) -> None:
    """Keeps samples, with the sha256 by which they are known to be whole."""
    content = {"sha256": _checksum(specs), "samples": [b64encode(spec).decode() for spec in specs]}
    write_json(file, content)


def read(file: Path) -> list[bytes] | None:
    """Samples that were kept, None where there are none or they are damaged."""
    try:
        content = load_json(file)
        specs = [b64decode(sample) for sample in content["samples"]]
        return specs if content["sha256"] == _checksum(specs) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(specs: list[bytes]) -> str:
    """sha256 of samples."""
    return hashlib.sha256(b"".join(hashlib.sha256(spec).digest() for spec in specs)).hexdigest()
