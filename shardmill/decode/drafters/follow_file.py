"""Saves a follow table, and the identity of its model, as plain arrays: loading one runs no code."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardmill.decode.drafters.follow import BITS, KINDS, TAIL, FollowTable
from shardmill.decode.errors import DecodeError

_MASK = (1 << BITS) - 1


@dataclass(frozen=True)
class Numbering:
    """The model whose token ids a table contains.

    Attributes:
        vocab: the model's vocabulary size.
        tokenizer: a digest of its tokenizer.
    """

    vocab: int
    tokenizer: str


def save_table(path: Path, table: FollowTable, numbering: Numbering) -> None:
    """Write the table to exactly `path`, through a temporary file beside it.

    Raises:
        DecodeError: the file can't be written.
    """
    rows = list(table.rows())
    keys = [[key >> i * BITS & _MASK for i in range(TAIL)] for _, key, _, _ in rows]
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                vocab=np.array(numbering.vocab, dtype=np.int64),
                tokenizer=np.array(numbering.tokenizer),
                kind=np.array([r[0] for r in rows], dtype=np.int8),
                key=np.array(keys, dtype=np.int32).reshape(-1, TAIL),
                token=np.array([r[2] for r in rows], dtype=np.int32),
                count=np.array([r[3] for r in rows], dtype=np.int32),
            )
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DecodeError(f"{path}: the draft table can't be written: {error.strerror}") from error


def load_table(path: Path, into: FollowTable, numbering: Numbering) -> FollowTable:
    """Fill `into` with a table written by `save_table`, and return it.

    Raises:
        DecodeError: the file is missing, damaged, something else, or the table of another model.
    """
    if path.exists() and not path.is_file():
        raise DecodeError(f"{path} is no saved draft table: not a regular file")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = Numbering(int(arrays["vocab"]), str(arrays["tokenizer"]))
            columns = [arrays[name] for name in ("kind", "key", "token", "count")]
    except Exception as error:  # numpy may raise any exception for a damaged archive
        raise DecodeError(f"{path} is no saved draft table: {error}") from error
    _check_tokens(path, found, numbering)
    _check_columns(path, columns, numbering.vocab)
    for kind, parts, token, count in zip(*(column.tolist() for column in columns), strict=True):
        key = sum(part << i * BITS for i, part in enumerate(parts))
        into.put(kind, key, token, int(count))
    return into


def _check_tokens(path: Path, found: Numbering, wanted: Numbering) -> None:
    if found.vocab != wanted.vocab:
        why = f"a model with {found.vocab} tokens, this one has {wanted.vocab}"
    elif found.tokenizer != wanted.tokenizer:
        why = "a model with another tokenizer"
    else:
        return
    raise DecodeError(f"{path}: this draft table was learned from {why}: name another file, or delete it")


def _check_columns(path: Path, columns: list[NDArray[np.int64]], vocab: int) -> None:
    """Raise DecodeError for arrays that no table has. A key contains each token plus one, and 0 for no token."""
    kind, key, token, count = columns
    rows = (kind.size,)
    matching = [column.shape for column in columns] == [rows, (*rows, TAIL), rows, rows]
    if not matching or any(column.dtype.kind not in "iu" for column in columns):
        raise DecodeError(f"{path} is no saved draft table: its columns do not match")
    for column, low, high in ((kind, 0, KINDS - 1), (key, 0, vocab), (token, 0, vocab - 1), (count, 1, None)):
        if column.size and (column.min() < low or (high is not None and column.max() > high)):
            raise DecodeError(f"{path} is no saved draft table: it holds a number out of range")
