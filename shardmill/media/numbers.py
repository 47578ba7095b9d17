"""The numbers of rows: tokens beyond the vocabulary that say by their content which row of which picture they are.

So two pictures never share a token, and the same picture always has the same ones: sessions and kept prefixes, which
compare texts by their tokens, need to know nothing of pictures.
"""

from __future__ import annotations

import hashlib

from shardmill.media.pixels import View
from shardmill.media.sound_rules import Window

BITS = 62  # a number fits into 64 bits beside any vocabulary; of a million rows, two agree once in ten million times


def row_numbers(view: View | Window, build: str, vocab: int, count: int) -> tuple[int, ...]:
    """Return the numbers of a view's rows.

    Args:
        view: the columns that the tower gets, which decide the rows, and their grid.
        build: what tells the build's programs from others, since they decide the rows as well.
        vocab: the size of the vocabulary.
        count: how many rows there are.
    """
    columns = view.columns
    content = hashlib.sha256(repr((build, view.grid, columns.shape)).encode())
    content.update(columns.tobytes())
    beginning = content.digest()
    rows = (hashlib.sha256(beginning + row.to_bytes(4, "little")).digest() for row in range(count))
    return tuple(vocab + (int.from_bytes(digest[:8], "little") >> (64 - BITS)) for digest in rows)
