"""Canonical JSON, and records that contain their own digest, like all records of a build."""

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
    """Return JSON with sorted keys, an indentation of one space and a final newline."""
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the sha256 of all other content to a record."""
    body = {key: value for key, value in content.items() if key != SEAL}
    return body | {SEAL: hashlib.sha256(dumps(body).encode()).hexdigest()}


def write_durably(path: Path, text: str) -> None:
    """Write a text so that the file is either complete or absent, even after a power failure."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            write_out(file)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_out(file: IO[str]) -> None:
    """Flush a file to the disk itself; macOS' fsync leaves data in the disk's cache (see its fsync(2))."""
    file.flush()
    whole = getattr(fcntl, "F_FULLFSYNC", None)
    if whole is not None:
        with suppress(OSError):  # not supported by some disks, such as network disks
            fcntl.fcntl(file, whole)
            return
    os.fsync(file.fileno())
