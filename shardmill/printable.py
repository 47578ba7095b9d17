"""Makes text from files and libraries fit for a terminal: no name clears the screen or fakes a line of ours."""

from __future__ import annotations

import logging
from typing import Any

from kit_runner.error_texts import said, words


def printable(text: str, limit: int = 80) -> str:
    """Return at most `limit` characters of `text`, with a question mark for each that a terminal would obey."""
    clean = _shown(text[: limit + 1])
    return clean if len(clean) <= limit else clean[:limit] + "..."


def one_line(text: object) -> str:
    """Return all that is said, by an error mostly, in a single line; of one of Core ML its words."""
    return _shown(" ".join(words(str(text)).split()))


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or all the words of one of Core ML."""
    return said(error)


class PrintableFormatter(logging.Formatter):
    """Formats a traceback so that what a library quotes in it is fit for a terminal, too."""

    def formatException(self, ei: Any) -> str:
        """Return each of its lines as it is, with a question mark for what a terminal would obey."""
        return "\n".join(_shown(line.replace("\t", "    ")) for line in super().formatException(ei).split("\n"))


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
