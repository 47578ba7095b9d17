"""A text cut into windows: those of its first half for quantisers, those of its second for what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardmill.checkpoint.tokenizer import read_tokenizer


def windows(tokens: Sequence[int], opening: Sequence[int], size: int, count: int | None = None) -> list[list[int]]:
    """Return the first windows of a text, none overlapping, each begun as the tokenizer begins a text.

    Args:
        tokens: of the text.
        opening: those that the tokenizer puts first.
        size: tokens of a window.
        count: how many are wanted, all if None; fewer where the text is shorter.
    """
    room = size - len(opening)
    starts = range(0, len(tokens) - room + 1, room)
    return [[*opening, *tokens[start : start + room]] for start in starts][:count]


def halves(source: Path, text: str, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return all windows of a text's first half, and all of its second.

    Args:
        source: the checkpoint's folder, where the tokenizer lies.
        text: the text.
        size: tokens of a window.
    """
    tokenizer = read_tokenizer(source / "tokenizer.json")
    opening = tokenizer.encode("").ids
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    half = len(tokens) // 2
    return windows(tokens[:half], opening, size), windows(tokens[half:], opening, size)
