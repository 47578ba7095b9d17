"""Reads regular files only, for a device never ends, and a pipe may wait forever for a writer."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file. Raises OSError, which names it, where it is none or can't be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or opening a pipe would wait for its writer
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def check(path: Path) -> None:
    """Raises OSError, which names it, where a path that a library is to open is no regular file."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        number, why = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "not a regular file")
        raise OSError(number, why, str(path))


def read_text(path: Path) -> str:
    """The text of a regular file, each of its lines ended by a newline alone.

    Raises:
        OSError: it is no regular file, or can't be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    return io.IncrementalNewlineDecoder(None, translate=True).decode(read_bytes(path).decode("utf-8"), final=True)
