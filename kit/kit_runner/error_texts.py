"""The text of an error in one line, also for Core ML's errors, which print a userInfo; the library uses it too."""

from __future__ import annotations

import re

ENTRY = re.compile(r'^( *)"?(NSLocalized\w+|NSUnderlyingError)"? = (".*?"|[^"{(\n][^\n]*);$', re.M | re.S)
USER_INFO = re.compile(r'"?\{\n(?:(.*)\n)?\s*\}"?\.?\s*$', re.S)
UNDERLYING = re.compile(r'Error Domain=(\S+) Code=(-?\d+)(?: \\*"(.*?)\\*"(?= UserInfo=|\}|\)|,|"|$))?', re.S)
ESCAPED = re.compile(r"((?:\\U[0-9a-fA-F]{4})+)|\\([0-7]{3})|\\(.)", re.S)
PLAIN = {"n": "\n", "t": "\t", "r": "\r"}
SAID = ("NSLocalizedDescription", "NSLocalizedFailureReason", "NSLocalizedRecoverySuggestion")
NOTHING = ("", "(null)")
KEPT = 2000  # characters of a text in a record
SILENT = "Core ML gave no description"


def said(error: BaseException) -> str:
    """Return the message of an error in one line.

    For an error of Core ML this is its description. For any other error it is the first line, plus the second if the
    first ends with a colon, or the error's type if the message is empty.
    """
    text = str(error)
    if (told := words(text)) != text:
        return told
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if lines[0] == "{":  # a userInfo that was cut off
        return " ".join(lines)
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def words(text: str) -> str:
    """Replace a userInfo at the end of a text by its message; return any other text unchanged.

    The message consists of the userInfo's description, its reason, and domain, code and text of the underlying errors.
    Without a description it contains all entries.
    """
    inside = USER_INFO.search(text)
    if not inside:
        return text
    return " ".join(f"{text[: inside.start()]}{_told(inside[1] or '') or SILENT}".split())


def _told(entries: str) -> str:
    """Return the message in a userInfo; `entries` are the lines between its braces."""
    rows = [(len(match[1]), match[2], _unescaped(match[3])) for match in ENTRY.finditer(entries)]
    outer = min((depth for depth, _, _ in rows), default=0)  # a nested entry belongs to another error
    by_name = {name: value for depth, name, value in rows if depth == outer}
    words = [by_name[name] for name in SAID if name in by_name]
    if not words:
        return entries
    for domain, code, text in UNDERLYING.findall(by_name.get("NSUnderlyingError", "")):
        known = text in NOTHING or any(text in word for word in words)
        words.append(f"({domain} {code})" if known else f"({domain} {code}: {text})")
    return " ".join(words)


def _unescaped(value: str) -> str:
    """Return the original of a string printed in a property list."""
    return ESCAPED.sub(_character, value[1:-1]) if value.startswith('"') else value


def _character(match: re.Match[str]) -> str:
    if match[1]:
        return bytes.fromhex(match[1].replace("\\U", "")).decode("utf-16-be", "replace")
    return chr(int(match[2], 8)) if match[2] else PLAIN.get(match[3], match[3])
