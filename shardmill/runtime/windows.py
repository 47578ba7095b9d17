"""Windows of texts that are longer than a pass of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.runtime.kv import Floats

SHARE = 4  # an approximation drops this part of a window at either end
LEAST_STEP = 4  # exact windows advance by at least this part of a window


@dataclass(frozen=True)
class TextPasses:
    """The passes of a text.

    Attributes:
        tokens: the tokens of each pass.
        taken: the rows of each pass that belong to the text.
        exact: True if these rows equal the rows of the whole text in one pass.
    """

    tokens: tuple[tuple[int, ...], ...]
    taken: tuple[slice, ...]
    exact: bool

    def joined(self, rows: Sequence[Floats]) -> Floats:
        """Return a row for each token of the text, given the rows of each pass."""
        return np.concatenate([of_pass[taken] for of_pass, taken in zip(rows, self.taken, strict=True)])


def cut_windows(count: int, longest: int, reach: int | None) -> list[tuple[int, int, int, int]]:
    """Return windows over `count` tokens: each [start, end), and within it the [first, last) whose rows are used.

    Args:
        count: tokens of the text.
        longest: the most tokens of a window.
        reach: the largest distance at which one token influences another; None if unlimited.
    """
    if count <= longest:
        return [(0, count, 0, count)]
    exact = is_exact(longest, reach)
    margin = reach if exact and reach is not None else longest // SHARE
    windows = []
    for start in range(0, count - 2 * margin, longest - 2 * margin):
        end = min(start + longest, count)
        windows.append((start, end, start + margin if start else 0, end - margin if end < count else count))
    return windows


def is_exact(longest: int, reach: int | None) -> bool:
    """Return whether windows of at most `longest` tokens give the same rows as the whole text.

    They can if they contain more than `reach` tokens at either end, and do if they then still advance by a quarter.
    """
    return reach is not None and LEAST_STEP * (longest - 2 * reach) >= longest


def text_windows(
    tokens: Sequence[int], around: tuple[Sequence[int], Sequence[int]], longest: int, reach: int | None
) -> TextPasses:
    """Split a text into passes.

    If windows are exact, special tokens stand only at the ends of the text. Otherwise they surround every window, as
    the model expects for a text.

    Args:
        tokens: the text's tokens.
        around: the special tokens that the tokenizer puts before and after every text.
        longest: the most tokens of a pass.
        reach: the largest distance at which one token influences another; None if unlimited.
    """
    before, after = (tuple(part) for part in around)
    whole = (*before, *tokens, *after)
    if len(whole) <= longest or is_exact(longest, reach):
        cuts = cut_windows(len(whole), longest, reach)
        inner = range(len(before), len(before) + len(tokens))  # positions of the text's tokens in the whole
        used = [(start, max(first, inner.start), min(last, inner.stop)) for start, _, first, last in cuts]
        taken = tuple(slice(first - start, max(first, last) - start) for start, first, last in used)
        return TextPasses(tuple(whole[start:end] for start, end, *_ in cuts), taken, True)
    room = longest - len(before) - len(after)
    if room < 1:
        raise ShardmillError(f"special tokens alone fill a pass of {longest} tokens; build larger buckets")
    cuts = cut_windows(len(tokens), room, reach)
    taken = tuple(slice(len(before) + first - start, len(before) + last - start) for start, _, first, last in cuts)
    return TextPasses(tuple((*before, *tokens[start:end], *after) for start, end, *_ in cuts), taken, False)
