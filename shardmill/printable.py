"""Text that comes from a file or a library, fit for a terminal: no name clears the screen or writes a line of ours."""

from __future__ import annotations


def printable(text: str, limit: int = 80) -> str:
    """At most `limit` characters of `text`, with a question mark for each that a terminal would obey, not show."""
    clean = _shown(text[: limit + 1])
    return clean if len(clean) <= limit else clean[:limit] + "..."


def one_line(text: object) -> str:
    """All that is said, by an error mostly, in a single line."""
    return _shown(" ".join(str(text).split()))


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
