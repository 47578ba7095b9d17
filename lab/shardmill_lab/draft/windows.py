"""Cuts a text into the windows that a head learns from. Imports nothing heavy: a short text is refused at once."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 256  # tokens of a text


def windows_of(tokens: Sequence[int]) -> list[list[int]]:
    """Return the tokens in windows; the last ones, which fill no window, are left out."""
    return [list(tokens[start : start + WINDOW]) for start in range(0, len(tokens) - WINDOW + 1, WINDOW)]
