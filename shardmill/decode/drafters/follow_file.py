"""A follow table as an .npz file of plain arrays: loading one runs no code."""

import zipfile
from pathlib import Path

import numpy as np

from shardmill.decode.drafters.follow import BITS, KINDS, TAIL, FollowTable
from shardmill.decode.errors import DecodeError

_MASK = (1 << BITS) - 1


def save_table(path: Path, table: FollowTable) -> None:
    """Writes the table to exactly `path`, by way of a temporary file beside it. Raises DecodeError where it can't."""
    rows = list(table.rows())
    keys = [[key >> i * BITS & _MASK for i in range(TAIL)] for _, key, _, _ in rows]
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                kind=np.array([r[0] for r in rows], dtype=np.int8),
                key=np.array(keys, dtype=np.int32).reshape(-1, TAIL),
                token=np.array([r[2] for r in rows], dtype=np.int32),
                count=np.array([r[3] for r in rows], dtype=np.int32),
            )
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DecodeError(f"{path}: the draft table can't be written: {error.strerror}") from error


def load_table(path: Path, into: FollowTable) -> FollowTable:
    """`into`, filled with what `save_table` wrote.

    Raises:
        DecodeError: the file is missing, damaged or something else.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            columns = [arrays[name].tolist() for name in ("kind", "key", "token", "count")]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DecodeError(f"{path} is no saved draft table: {error}") from error
    for kind, parts, token, count in zip(*columns, strict=True):
        if not 0 <= kind < KINDS:
            raise DecodeError(f"{path} is no saved draft table: it has a context of kind {kind}")
        key = sum(part << i * BITS for i, part in enumerate(parts))
        into.put(kind, key, token, int(count))
    return into
