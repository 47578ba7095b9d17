"""Splits MIL text into tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from portable_coreml.errors import ProgramError

MAX_NESTING = 64  # of blocks, types and values: no real program comes near
_TOKEN = re.compile(
    r"""\s*( "(?:[^"\\]|\\.)*"                            # string
          | -> | \.\.\.
          | [-+]? (?: 0x[0-9a-fA-F.]+p[-+]?\d+ | inf | nan | \d[\d.]* (?: e[-+]?\d+ )? ) \b  # number
          | [A-Za-z_@][\w.@/$]*                         # name
          | [\[\](){}<>,;=?] )""",
    re.VERBOSE,
)
_Item = TypeVar("_Item")
_UNESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class Scanner:
    """A text with one token of look-ahead, and the small constructs that all larger constructs share."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.token = ""
        self.advance()

    def fail(self, what: str) -> ProgramError:
        line = self.text.count("\n", 0, self.at) + 1
        return ProgramError(f"model.mil, line {line}: {what}, found {self.token[:40]!r}")

    def advance(self) -> str:
        taken = self.token
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            if self.text[self.at :].strip():
                raise self.fail("unreadable text")
            self.token = ""
        else:
            self.token, self.at = match.group(1), match.end()
        return taken

    def expect(self, token: str) -> None:
        if self.token != token:
            raise self.fail(f"expected {token!r}")
        self.advance()

    def accept(self, token: str) -> bool:
        if self.token != token:
            return False
        self.advance()
        return True

    def name(self) -> str:
        if not self.token or not (self.token[0].isalpha() or self.token[0] in "_@"):
            raise self.fail("expected a name")
        return self.advance()

    def string(self) -> str:
        if not self.token.startswith('"'):
            raise self.fail("expected a string")
        body = self.advance()[1:-1]
        return re.sub(r"\\(.)", lambda m: _UNESCAPES.get(m.group(1), m.group(1)), body) if "\\" in body else body

    def integer(self) -> int:
        try:
            number = int(self.token)
        except ValueError:
            raise self.fail("expected an integer") from None
        self.advance()
        return number

    def several(self, read: Callable[[], _Item], close: str) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while not self.accept(close):
            if items:
                self.expect(",")
            items.append(read())
        return tuple(items)

    def nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise self.fail(f"more than {MAX_NESTING} levels of nesting")
