"""A text of any length through an encoder: whole where a program takes it, else in windows that overlap.

What a model gives for a token depends on the tokens around it, as far as its layers reach. Where windows overlap by
more than that, the rows are those of the whole text; else they are an approximation, and are said to be. The closer the
overlap comes to a whole window, the more passes a text takes. Windows that would advance by less than a quarter are
therefore cut as approximations too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.host import Floats

SHARE = 4  # an approximation leaves out this part of a window at either end
LEAST_STEP = 4  # exact windows advance by at least this part of a window


@dataclass(frozen=True)
class Windows:
    """The passes of a text.

    Attributes:
        tokens: of each pass.
        taken: the rows of each pass that are the text's.
        exact: whether these are the rows of the whole text in one pass.
    """

    tokens: tuple[tuple[int, ...], ...]
    taken: tuple[slice, ...]
    exact: bool

    def joined(self, rows: Sequence[Floats]) -> Floats:
        """A row for each token of the text, given those of each pass."""
        return np.concatenate([found[own] for found, own in zip(rows, self.taken, strict=True)])


def cut(count: int, longest: int, reach: int | None) -> list[tuple[int, int, int, int]]:
    """Windows over so many tokens: each [start, end), and of these the [first, last) whose rows are taken.

    Args:
        count: tokens of the text.
        longest: tokens that a window may have.
        reach: how far a token's row depends on others; None for any distance.
    """
    if count <= longest:
        return [(0, count, 0, count)]
    exact = is_exact(longest, reach)
    margin = reach if exact and reach is not None else longest // SHARE
    found = []
    for start in range(0, count - 2 * margin, longest - 2 * margin):
        end = min(start + longest, count)
        found.append((start, end, start + margin if start else 0, end - margin if end < count else count))
    return found


def is_exact(longest: int, reach: int | None) -> bool:
    """Return whether windows of at most `longest` tokens are cut so that they give what the whole text would.

    They can be if they hold more than `reach` tokens at either end, and are if they then still advance by a quarter.
    """
    return reach is not None and LEAST_STEP * (longest - 2 * reach) >= longest


def windows(
    tokens: Sequence[int], around: tuple[Sequence[int], Sequence[int]], longest: int, reach: int | None
) -> Windows:
    """The passes of a text.

    Where windows are exact, the tokens around the text stand at its ends only; else at those of every window, as the
    model knows it from texts.

    Args:
        tokens: the text's.
        around: those that the tokenizer puts before every text and after it.
        longest: the most tokens of a pass.
        reach: how far a token's row depends on others.
    """
    before, after = (tuple(part) for part in around)
    whole = (*before, *tokens, *after)
    if len(whole) <= longest or is_exact(longest, reach):
        cuts = cut(len(whole), longest, reach)
        own = range(len(before), len(before) + len(tokens))  # of the whole, those that are the text's
        kept = [(start, max(first, own.start), min(last, own.stop)) for start, _, first, last in cuts]
        taken = tuple(slice(first - start, max(first, last) - start) for start, first, last in kept)
        return Windows(tuple(whole[start:end] for start, end, *_ in cuts), taken, True)
    room = longest - len(before) - len(after)
    if room < 1:
        raise ShardmillError(f"a pass takes {longest} tokens, which the tokenizer's own fill; build larger buckets")
    cuts = cut(len(tokens), room, reach)
    taken = tuple(slice(len(before) + first - start, len(before) + last - start) for start, _, first, last in cuts)
    return Windows(tuple((*before, *tokens[start:end], *after) for start, end, *_ in cuts), taken, False)
