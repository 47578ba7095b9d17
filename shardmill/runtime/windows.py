"""A text of any length through an encoder: whole where a program takes it, else in windows that overlap.

What a model gives for a token depends on the tokens around it, as far as its layers reach. Where windows overlap by
more than that, the rows are those of the whole text; else they are an approximation, and are said to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.host import Floats

SHARE = 4  # an approximation leaves out this part of a window at either end


@dataclass(frozen=True)
class Rows:
    """What comes out for a text.

    Attributes:
        values: a row for each token.
        windows: how many passes it took.
        exact: whether the rows are those of the whole text in one pass.
    """

    values: Floats
    windows: int
    exact: bool


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
    """Whether windows of that length give what the whole text would."""
    return reach is not None and longest > 2 * reach


def through(
    tokens: Sequence[int],
    around: tuple[Sequence[int], Sequence[int]],
    longest: int,
    reach: int | None,
    run: Callable[[Sequence[int]], Floats],
) -> Rows:
    """A row for each token of a text.

    Where windows are exact, the tokens around the text stand at its ends only; else at those of every window, as the
    model knows it from texts.

    Args:
        tokens: the text's.
        around: those that the tokenizer puts before every text and after it.
        longest: the most tokens of a pass.
        reach: how far a token's row depends on others.
        run: a pass.
    """
    before, after = (list(part) for part in around)
    whole = [*before, *tokens, *after]
    if len(whole) <= longest or is_exact(longest, reach):
        cuts = cut(len(whole), longest, reach)
        parts = [run(whole[start:end])[first - start : last - start] for start, end, first, last in cuts]
        return Rows(np.concatenate(parts)[len(before) : len(before) + len(tokens)], len(cuts), True)
    room = longest - len(before) - len(after)
    if room < 1:
        raise ShardmillError(f"a pass takes {longest} tokens, which the tokenizer's own fill; build larger buckets")
    cuts = cut(len(tokens), room, reach)
    parts = []
    for start, end, first, last in cuts:
        rows = run([*before, *tokens[start:end], *after])
        parts.append(rows[len(before) + first - start : len(before) + last - start])
    return Rows(np.concatenate(parts), len(cuts), False)
