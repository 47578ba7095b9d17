"""A reader of a call in tags, `<function=f><parameter=a>1</parameter></function>`, some of which a model leaves out.

What a tag means depends on what follows it, since a parameter's text may hold any tag. So a parameter ends at its own
end tag, if another tag follows that. Where a model left it out, a parameter ends where another one of the function
begins, or where the whole call is closed and nothing but calls follows. Each tag is read once.
"""

from __future__ import annotations

import re
from typing import Any

from shardmill.serve.call_texts import json_types, loose
from shardmill.serve.tools import Schemas

LONGEST_TAG = 256
TAG = re.compile(r"<(/?)((?:seed:)?tool_call|function|parameter)(?:=([^<>\n]{1,240}))?>")


class FunctionReader:
    """A reader of one function after its opening tag. However its text is cut into pieces, the arguments are the same.

    Args:
        name: the function.
        tools: the functions that the model may call.
        lines: whether the format gives each tag after a text its own line.

    Attributes:
        over: whether the function has ended.
        rest: text that has not been read; once it is over, what follows the function.
        arguments: the arguments; None if it is no call.
    """

    def __init__(self, name: str, tools: Schemas, *, lines: bool) -> None:
        known = tools.get(name, {}).get("properties")
        self._schemas: dict[str, Any] = known if isinstance(known, dict) else {}
        self._lines = lines
        self._raw: list[str] = []
        self._outside: list[str] = []  # text outside of parameters
        self._texts: dict[str, str] = {}
        self._key: str | None = None  # of the open parameter
        self._value: list[str] = []  # its text so far
        self._closed: int | None = None  # where its end tag stands in `_value`, if only white space has followed
        self._left: int | None = None  # where the call was closed instead, if only white space and end tags followed
        self._doubtful = False
        self.rest, self.over = "", False
        self.arguments: dict[str, Any] | None = None

    @property
    def raw(self) -> str:
        """Return all text that was read."""
        return "".join(self._raw)

    def read(self, text: str, *, ended: bool) -> bool:
        """Read on, with the next text, which may be the answer's last; return whether the function is over."""
        self.rest += text
        at = 0
        while not self.over:
            tag = TAG.search(self.rest, at)
            end = tag.start() if tag else len(self.rest) - (0 if ended else _half(self.rest))
            self._add(self.rest[at:end])
            at = end
            if not tag:
                break
            if not self._take(tag):
                at = tag.start()
                break
            at = tag.end()
        self.rest = self.rest[at:]
        if ended and not self.over and self._left is not None:
            self._guess(self._left)
            self._finish()
        return self.over

    def _add(self, text: str) -> None:
        """Take text between two tags."""
        if text:
            self._raw.append(text)
            (self._outside if self._key is None else self._value).append(text)
            if not text.isspace():
                self._closed = self._left = None

    def _take(self, tag: re.Match[str]) -> bool:
        """Take a tag; return False if it stands behind the function."""
        slash, kind, name = tag.groups()
        kind = slash + kind.removeprefix("seed:")
        if bool(name) != (kind in ("function", "parameter")) or (self._key is not None and not self._ends(kind, name)):
            self._raw.append(tag[0])
            (self._outside if self._key is None else self._value).append(tag[0])
            return True
        if kind in ("function", "tool_call", "/tool_call"):
            self._finish()
            return False
        self._raw.append(tag[0])
        if kind == "/function":
            self._finish()
        elif kind == "parameter":
            self._key, self._value, self._closed, self._left = name, [], None, None
        return True

    def _ends(self, kind: str, name: str | None) -> bool:
        """Return whether a tag ends the open parameter; if not, it is a part of the parameter's text, so far."""
        if kind == "/parameter":
            self._closed, self._left = len(self._value), None
            return False
        if self._closed is not None:
            return self._end_parameter(self._closed)
        if self._lines and self._left is None and self._value and not self._value[-1].endswith("\n"):
            return False
        here = len(self._value) if self._left is None else self._left
        if kind == "parameter":
            new = name not in self._texts and name != self._key and (name in self._schemas or not self._schemas)
            return new and self._guess(here)
        if kind in ("/function", "/tool_call"):
            self._left = here
            return False
        return self._left is not None and self._guess(here)

    def _guess(self, end: int) -> bool:
        """End a parameter without its end tag. If there is one, with text behind it, nobody knows what was meant."""
        self._doubtful |= "</parameter>" in self._value[:end]
        return self._end_parameter(end)

    def _end_parameter(self, end: int) -> bool:
        text = "".join(self._value[:end])
        assert self._key is not None
        self._texts[self._key] = text.removeprefix("\n").removesuffix("\n")
        self._key = None
        return True

    def _finish(self) -> None:
        self.over = True
        outside = "".join(self._outside).strip()
        if self._doubtful:
            return
        if not outside:
            self.arguments = {key: _typed(text, self._schemas.get(key)) for key, text in self._texts.items()}
        elif not self._texts:  # some models write an object in place of the parameters
            try:
                content = loose(outside)
            except ValueError:
                content = None
            self.arguments = content if isinstance(content, dict) else None


def _half(text: str) -> int:
    """Return how many characters at the end of `text` may begin a tag."""
    at = text.rfind("<", max(0, len(text) - LONGEST_TAG))
    return 0 if at < 0 or ">" in text[at:] or "\n" in text[at:] else len(text) - at


def _typed(text: str, schema: Any) -> Any:
    """Return a parameter's value; its schema tells texts from numbers."""
    kinds = json_types(schema)
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    try:
        return loose(text)
    except ValueError:
        return text
