"""JSON with one spelling, and a record that carries the digest of itself, as all records of a build do."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

SEAL = "shardmill_seal"


def dumps(content: Any) -> str:
    """Sorted keys, one space, a final newline."""
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the sha256 of all else in it."""
    body = {key: value for key, value in content.items() if key != SEAL}
    return body | {SEAL: hashlib.sha256(dumps(body).encode()).hexdigest()}


def write_durably(path: Path, text: str) -> None:
    """Writes a text that is there whole or not at all, also after the power fails."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            write_out(file)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_out(file: IO[str]) -> None:
    """Hand a file's text to the disk itself; fsync of macOS leaves it in the disk's cache (fsync(2) there)."""
    file.flush()
    whole = getattr(fcntl, "F_FULLFSYNC", None)
    if whole is not None:
        with suppress(OSError):  # a disk that does not know it, of a network perhaps
            fcntl.fcntl(file, whole)
            return
    os.fsync(file.fileno())
