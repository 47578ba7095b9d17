"""Reads regular files only: a device never ends, and a pipe may wait forever for someone to write to it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from portable_coreml.errors import ProgramError


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises ProgramError for anything else, and for a file that can't be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or opening a pipe would wait for its writer
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ProgramError(f"{path}: not a regular file")
            return file.read()
    except OSError as error:
        raise ProgramError(f"{path}: can't be read: {error.strerror}") from error


def read_utf8(path: Path) -> str:
    """Return the text of a regular file in UTF-8. Raises ProgramError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProgramError(f"{path}: not UTF-8 text: {error}") from error


def read_json(path: Path) -> Any:
    """Return the JSON value in a regular file. Raises ProgramError, also for one nested too deeply to be parsed."""
    try:
        return json.loads(read_utf8(path))
    except RecursionError as error:
        raise ProgramError(f"{path}: damaged: its JSON is nested too deeply") from error
    except ValueError as error:
        raise ProgramError(f"{path}: damaged: not JSON: {error}") from error
