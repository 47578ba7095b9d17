"""Counts of what followed a context, for several kinds of context at once.

Besides the last one to three tokens, contexts with gaps are kept: lists and tables repeat their frame
around a word that is new. One kind pairs a token with what followed it the time before, so that "1." at the last
line break suggests "2." at this one.
"""

from collections.abc import Iterator, Sequence

KINDS = 6
LONGEST = 2  # kind of the longest context
TAIL = 3  # tokens that a context reaches back
NO_TOKEN = -1
BITS = 21  # per token of a key; vocabularies of up to two million
_TOP = 4  # followers that a context proposes
_SPREAD = 0.5  # occurrences that each further follower is worth against the others
ONCE = 1 / (1 + _SPREAD)  # share of a follower seen once, where there is no other


def context_keys(tail: Sequence[int], previous: int) -> tuple[int, ...]:
    """One key per kind: the context's tokens, packed into an integer.

    Args:
        tail: the last `TAIL` tokens, `NO_TOKEN` where there is none.
        previous: what followed the last token the time before, or `NO_TOKEN`.
    """
    b, c, d = tail
    one = d + 1
    two = (c + 1) << BITS | one
    three = (b + 1) << 2 * BITS | two
    return one, two, three, (previous + 1) << BITS | one, c + 1, (b + 1) << BITS | one


class Followers:
    """What followed one context, seen more than once. `top` holds its most frequent followers, unordered."""

    __slots__ = ("counts", "shares", "top", "total")

    def __init__(self, token: int, count: float) -> None:
        self.total = count
        self.counts = {token: count}
        self.top = [token]
        self.shares: tuple[tuple[int, float], ...] = ()  # as `ranked` left them; empty: out of date

    def add(self, token: int, count: float) -> None:
        """Counts `token`."""
        self.total += count
        self.shares = ()
        counts, top = self.counts, self.top
        counts[token] = held = counts.get(token, 0.0) + count
        if token in top:
            return
        if len(top) < _TOP:
            top.append(token)
            return
        rarest = min(range(_TOP), key=lambda i: counts[top[i]])
        if held >= counts[top[rarest]]:
            top[rarest] = token

    def ranked(self) -> tuple[tuple[int, float], ...]:
        """The top followers and their shares; a context with many followers is less sure of each."""
        scale = 1.0 / (self.total + _SPREAD * len(self.counts))
        self.shares = tuple((t, scale * self.counts[t]) for t in self.top)
        return self.shares


class FollowTable:
    """Context -> what followed it, one mapping per kind. What followed only once is kept as the bare
    token: most contexts are such, and a large table is read at the speed of memory.
    """

    def __init__(self) -> None:
        self.kinds: tuple[dict[int, int | Followers], ...] = tuple({} for _ in range(KINDS))

    def __len__(self) -> int:
        return sum(1 for _ in self.rows())

    def add(self, keys: Sequence[int], token: int, kinds: Sequence[int]) -> int:
        """Counts `token` after those of `keys` that are of `kinds`; returns how many pairs are new."""
        new = 0
        for kind in kinds:
            key = keys[kind]
            table = self.kinds[kind]
            if key in table:
                new += self.put(kind, key, token, 1.0)
            else:
                table[key] = token
                new += 1
        return new

    def put(self, kind: int, key: int, token: int, count: float) -> bool:
        """Adds `count` occurrences of `token` after one context; whether that pair is new."""
        table = self.kinds[kind]
        found = table.get(key)
        if found is None:
            table[key] = token if count == 1 else Followers(token, count)
            return True
        if isinstance(found, int):
            table[key] = followers = Followers(found, 1.0)
            followers.add(token, count)
            return token != found
        new = token not in found.counts
        found.add(token, count)
        return new

    def votes(
        self, into: dict[int, float], weights: Sequence[float], keys: Sequence[int], kinds: Sequence[int]
    ) -> float:
        """Adds weight times share of the known contexts' top followers; returns those contexts' weight."""
        cast = 0.0
        for kind in kinds:
            found = self.kinds[kind].get(keys[kind])
            if found is None:
                continue
            weight = weights[kind]
            cast += weight
            if type(found) is int:
                into[found] += weight * ONCE
            else:
                for token, share in found.shares or found.ranked():  # type: ignore[union-attr]
                    into[token] += weight * share
        return cast

    def rows(self) -> Iterator[tuple[int, int, int, float]]:
        """Every (kind, key, token, count)."""
        for kind, table in enumerate(self.kinds):
            for key, found in table.items():
                pairs = ((found, 1.0),) if isinstance(found, int) else found.counts.items()
                for token, count in pairs:
                    yield kind, key, token, count


def decayed(table: FollowTable, factor: float, least: float) -> FollowTable:
    """A table of all counts times `factor`, without those that fall below `least`."""
    kept = FollowTable()
    for kind, key, token, count in table.rows():
        if count * factor >= least:
            kept.put(kind, key, token, count * factor)
    return kept
