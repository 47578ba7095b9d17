"""Counts the followers of each context, for several kinds of context, and scores the next token by the counts.

Besides the last one to three tokens, contexts with gaps are kept: lists and tables repeat their frame around a word
that is new. One kind pairs a token with its previous follower, so that "1." at the last line break suggests "2." at
this one.

A context adds to the score of each of its followers: a weight times the follower's share, a constant, and a weight
times the logarithm of its count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log1p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from drafted_decoding.engine import DecodeError

KINDS = 6
LONGEST = 2  # kind of the longest context
TAIL = 3  # length of a context in tokens
NO_TOKEN = -1
BITS = 21  # bits per token in a key, for vocabularies of up to two million
_MASK = (1 << BITS) - 1
_TOP = 4  # followers that a context proposes
_SPREAD = 0.5  # occurrences that each additional follower counts against the others
ONCE = 1 / (1 + _SPREAD)  # share of the only follower, seen once
_COUNTS = 64  # larger counts are treated as this count
_PART = 64  # share of a kind's contexts that is listed at a time, as a dict is slow to find its oldest entry
_PATIENCE = 8  # pairs to inspect for each pair to forget
Weights = tuple[float, float, float]  # of a kind of context: for the share, for presence, for log(1 + count)


def context_keys(tail: Sequence[int], previous: int) -> tuple[int, ...]:
    """Return one key per kind: the context's tokens, packed into an integer.

    Args:
        tail: the last `TAIL` tokens, with `NO_TOKEN` for missing ones.
        previous: the previous follower of the last token, or `NO_TOKEN`.
    """
    b, c, d = tail
    one = d + 1
    two = (c + 1) << BITS | one
    three = (b + 1) << 2 * BITS | two
    return one, two, three, (previous + 1) << BITS | one, c + 1, (b + 1) << BITS | one


class Followers:
    """The followers of a context that has several. `top` lists its most frequent followers, unordered."""

    __slots__ = ("counts", "least", "top", "total")

    def __init__(self, token: int, count: int) -> None:
        self.total = count
        self.counts = {token: count}
        self.top = [token]
        self.least = 0  # no follower in `top` has a lower count

    def add(self, token: int, count: int) -> None:
        """Add `count` occurrences of `token`."""
        self.total += count
        counts, top = self.counts, self.top
        counts[token] = times = counts.get(token, 0) + count
        if token in top:
            return
        if len(top) < _TOP:
            top.append(token)
            return
        if times >= self.least:
            rarest = min(range(_TOP), key=lambda i: counts[top[i]])
            self.least = counts[top[rarest]]
            if times >= self.least:
                top[rarest] = token

    def share(self, token: int) -> float:
        """Return the token's share of the occurrences; additional followers lower each share."""
        return self.counts[token] / (self.total + _SPREAD * len(self.counts))


def only(packed: int) -> tuple[int, int]:
    """Return the token and the count of a context's only follower, see `FollowTable`."""
    return packed & _MASK, (packed >> BITS) + 1


Found = Sequence[int | Followers | None]  # the followers of a context of each kept kind


class FollowTable:
    """A table from context to followers, one mapping per kind.

    An only follower is one integer: the token, and above its bits how often it was seen after the first time. Most
    contexts have just one, however often a text comes again, and a large table is read at the speed of memory.

    Args:
        weights: by kind; None for kinds that are neither stored nor looked up.

    Attributes:
        pairs: its length, as the drafters that share it count it.
    """

    def __init__(self, weights: Sequence[Weights | None]) -> None:
        self.kinds: tuple[dict[int, int | Followers], ...] = tuple({} for _ in range(KINDS))
        self._kept = [(kind, self.kinds[kind]) for kind, w in enumerate(weights) if w]
        self.pairs = 0
        self._age = [0.0] * KINDS  # how many times forgetting has gone through the contexts of each kind
        self._weights = [(w[0], _count_followers(w), w[0] * ONCE + _count_followers(w)[1]) for w in weights if w]

    def __len__(self) -> int:
        return sum(1 for _ in self.rows())

    def add(self, keys: Sequence[int], token: int) -> int:
        """Count `token` after the context of each kind; return how many pairs are new."""
        new = 0
        for kind, table in self._kept:
            key = keys[kind]
            if key in table:
                new += self.put(kind, key, token, 1)
            else:
                table[key] = token
                new += 1
        return new

    def put(self, kind: int, key: int, token: int, count: int) -> bool:
        """Add `count` occurrences of `token` after one context; return whether that pair is new."""
        table = self.kinds[kind]
        known = table.get(key)
        if known is None:
            table[key] = token | (count - 1) << BITS
            return True
        if isinstance(known, int):
            if known & _MASK == token:
                table[key] = known + (count << BITS)
                return False
            table[key] = followers = Followers(*only(known))
            followers.add(token, count)
            return True
        new = token not in known.counts
        known.add(token, count)
        return new

    def forget(self, pairs: int) -> int:
        """Forget at least `pairs` pairs, or all if there are fewer, and return how many.

        Contexts take turns, the oldest first, in all kinds alike: each follower's count is halved, and a follower
        counted once is forgotten. If that frees too little, whole contexts are forgotten, so that the work is bounded.
        """
        forgotten = looked = 0
        while forgotten < pairs and (filled := [one for one in self._kept if one[1]]):
            kind, table = min(filled, key=lambda one: self._age[one[0]])
            for key in list(islice(table, 1 + len(table) // _PART)):
                self._age[kind] += 1 / len(table)
                removed = table.pop(key)
                counts = dict([only(removed)]) if isinstance(removed, int) else removed.counts
                for token, count in counts.items():
                    if count > 1 and looked < _PATIENCE * pairs:
                        self.put(kind, key, token, count // 2)  # moves to the young end
                    else:
                        forgotten += 1
                looked += len(counts)
                if forgotten >= pairs:
                    break
        return forgotten

    def find(self, keys: Sequence[int]) -> Found:
        """Look up the followers of a context, by kept kind."""
        return [table.get(keys[kind]) for kind, table in self._kept]

    def weigh(self, into: defaultdict[int, float], by_kind: Found, trust: Sequence[float]) -> None:
        """Add the scores of followers to `into`, each multiplied by the trust in its kind."""
        for followers, weight, (by_share, by_count, once) in zip(by_kind, trust, self._weights, strict=False):
            if followers is None:
                continue
            if type(followers) is int and followers <= _MASK:
                into[followers] += weight * once
                continue
            if type(followers) is int:
                token, count = only(followers)
                share = by_share / (count + _SPREAD)
                into[token] += weight * (share * count + by_count[count if count < _COUNTS else _COUNTS])
                continue
            counts = followers.counts  # type: ignore[union-attr]
            share = by_share / (followers.total + _SPREAD * len(counts))  # type: ignore[union-attr]
            for token in followers.top:  # type: ignore[union-attr]
                count = counts[token]
                into[token] += weight * (share * count + by_count[count if count < _COUNTS else _COUNTS])

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield every (kind, key, token, count)."""
        for kind, table in enumerate(self.kinds):
            for key, entry in table.items():
                pairs = (only(entry),) if isinstance(entry, int) else entry.counts.items()
                for token, count in pairs:
                    yield kind, key, token, count


def _count_followers(weights: Weights) -> tuple[float, ...]:
    """Return the part of a follower's score that does not depend on its share, by the follower's count."""
    _, present, per_log = weights
    return tuple(present + per_log * log1p(count) for count in range(_COUNTS + 1))


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
            saved = Numbering(int(arrays["vocab"]), str(arrays["tokenizer"]))
            columns = [arrays[name] for name in ("kind", "key", "token", "count")]
    except Exception as error:  # numpy may raise any exception for a damaged archive
        raise DecodeError(f"{path} is no saved draft table: {error}") from error
    _check_tokens(path, saved, numbering)
    _check_columns(path, columns, numbering.vocab)
    for kind, parts, token, count in zip(*(column.tolist() for column in columns), strict=True):
        key = sum(part << i * BITS for i, part in enumerate(parts))
        into.put(kind, key, token, int(count))
    return into


def _check_tokens(path: Path, saved: Numbering, wanted: Numbering) -> None:
    if saved.vocab != wanted.vocab:
        why = f"a model with {saved.vocab} tokens, this one has {wanted.vocab}"
    elif saved.tokenizer != wanted.tokenizer:
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
