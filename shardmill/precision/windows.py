"""A text cut into windows: the first half's windows for quantisers, the second half's for measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardmill.checkpoint.tokenizer import read_tokenizer


def windows(tokens: Sequence[int], opening: Sequence[int], size: int, count: int | None = None) -> list[list[int]]:
    """Return the first windows of a text, without overlap, each after the tokenizer's opening tokens.

    Args:
        tokens: the text's tokens.
        opening: the tokens that the tokenizer puts before a text.
        size: tokens per window.
        count: how many windows to return, all if None; fewer if the text is shorter.
    """
    room = size - len(opening)
    starts = range(0, len(tokens) - room + 1, room)
    return [[*opening, *tokens[start : start + room]] for start in starts][:count]


def halves(source: Path, text: str, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return all windows of a text's first half, and all windows of its second half.

    Args:
        source: the checkpoint's folder, where the tokenizer lies.
        text: the text.
        size: tokens per window.
    """
    tokenizer = read_tokenizer(source / "tokenizer.json")
    opening = tokenizer.encode("").ids
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    half = len(tokens) // 2
    return windows(tokens[:half], opening, size), windows(tokens[half:], opening, size)
