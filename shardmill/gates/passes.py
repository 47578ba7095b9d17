"""Ways to cut a sequence into passes; the result must be the same whichever is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One call: which tokens of the sequence are fed at which positions, and how many rows of the result are kept."""

    tokens: tuple[int, ...]  # indices into the sequence; the index of a wrong draft is not its position
    positions: tuple[int, ...]
    kept: int


def cut(length: int, widths: Sequence[int]) -> Iterator[Pass]:
    """Covers `length` tokens with passes of the given widths in rotation; the last one may be narrower."""
    start = turn = 0
    while start < length:
        end = min(start + widths[turn % len(widths)], length)
        span = tuple(range(start, end))
        yield Pass(span, span, end - start)
        start, turn = end, turn + 1


def with_rejected_drafts(length: int, width: int) -> Iterator[Pass]:
    """Passes of `width` whose first token is right and whose drafts are wrong, so that one row of each is kept.

    Each is followed by narrower passes of right tokens, which must not see the rejected slots that they have not yet
    overwritten. The drafts are tokens from elsewhere in the sequence.
    """
    start = turn = 0
    while start < length:
        wrong = turn % 3 == 0
        end = min(start + (width, 1, max(width - 2, 1))[turn % 3], length)
        positions = tuple(range(start, end))
        tokens = (start, *((7 * p + 3) % length for p in positions[1:])) if wrong else positions
        kept = 1 if wrong else end - start
        yield Pass(tokens, positions, kept)
        start, turn = start + kept, turn + 1


def schedules(length: int, upper: int) -> dict[str, list[Pass]]:
    """Every width from 2 to the upper bound, a mixture of widths, and rejected drafts, by name.

    The result of each must equal that of one token a pass.
    """
    ways = {f"T={t}": list(cut(length, [t])) for t in range(2, upper + 1)}
    if upper > 1:
        ways["mixed"] = list(cut(length, [1, upper, 2, upper - 1 or 1, 1, 1, upper]))
        ways["rejected drafts"] = list(with_rejected_drafts(length, upper))
    return ways
