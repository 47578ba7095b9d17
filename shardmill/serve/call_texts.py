"""Calls as models spell them: in JSON, in Python, in Gemma's JSON without quotes, or loosely between these.

Every reader here goes through its text once, whatever the text is: answers may be long, and are read on the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from shardmill.files import parse_json
from shardmill.serve.tools import LONGEST_NAME, Schemas

Call = tuple[str, Mapping[str, Any]]
_DEEPEST = 100  # objects and lists in each other


def loose(text: str) -> Any:
    """Return the value of a text in JSON, also with line breaks in its strings, or of one in Python's spelling.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _Python(text).only()


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def object_call(text: str) -> Call | None:
    """Return the call that an object's text describes; None if it describes none."""
    try:
        return _named_call(loose(text))
    except ValueError:
        return None


def _named_call(content: Any) -> Call | None:
    """Return the call that an object describes.

    Some models write the arguments as a text of JSON, or leave them out where there are none. Some write OpenAI's
    spelling, in which the object `function` has the name, and some write the name itself as `function`.
    """
    if isinstance(content, dict) and isinstance(content.get("function"), dict):
        content = content["function"]
    if not isinstance(content, dict):
        return None
    name = content.get("name", content.get("function"))
    arguments = content.get("arguments", content.get("parameters"))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
        arguments = [] if arguments is None else arguments  # a text that is no JSON is not the same as none
    arguments = {} if arguments is None else arguments
    return (name, arguments) if isinstance(name, str) and name and isinstance(arguments, dict) else None


def parsed(text: str) -> Any:
    """Return the value of a JSON text; None if it is no JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def python_calls(text: str, tools: Schemas) -> list[Call]:
    """Return the calls in `[f(a=1), g(b='x')]`, or in a list of JSON objects."""
    listed = parsed(text)
    if isinstance(listed, list):
        return [call for item in listed if (call := _named_call(item))]
    try:
        return _Python(text).calls()
    except ValueError:
        return []


_GAP = re.compile(r"\s*")
_NAME = re.compile(rf"[\w.-]{{1,{LONGEST_NAME}}}")
_KEY = re.compile(r"[^\s=,:()\[\]{}'\"]+")  # `from` and `user-id` are keys here, though not in Python
_STRING = re.compile(
    r"""[rR]?(?:'''(?:[^\\]|\\.)*?'''|\"""(?:[^\\]|\\.)*?\"""|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES: dict[str, str] = dict(zip("\n\\'\"abfnrtv", ("", *"\\'\"\a\b\f\n\r\t\v"), strict=True))
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


class _Python:
    """A reader of calls and values in Python's spelling. Names need not be Python's, and strings may have line breaks.

    Every method raises ValueError where the text is something else.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def only(self) -> Any:
        """Return the value that is the whole text."""
        value = self._value(0)
        self._end()
        return value

    def calls(self) -> list[Call]:
        """Return the calls that are the whole text, between brackets or not."""
        closing = "]" if self._skips("[") else ""
        calls: list[Call] = []
        while not calls or (self._skips(",") and not (closing and self._next() == closing)):
            name = self._match(_NAME)
            self._expect("(")
            calls.append((name, self._arguments()))
        if closing:
            self._expect(closing)
        self._end()
        return calls

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        while not self._skips(")"):
            key = self._match(_KEY)
            self._expect("=")
            if key in arguments:
                raise ValueError(f"{key} is given twice")
            arguments[key] = self._value(0)
            if not self._skips(","):
                self._expect(")")
                break
        return arguments

    def _value(self, depth: int) -> Any:
        first = self._next()
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        if first and first in "[(":
            return self._list(depth)
        if first == "{":
            return self._braces(depth)
        string = _STRING.match(self._text, self._at)
        if not string:
            return _word(self._match(_KEY))
        parts: list[str] = []
        while string:  # two strings side by side are one
            parts.append(_string(string[0]))
            self._at = string.end()
            self._next()
            string = _STRING.match(self._text, self._at)
        return "".join(parts)

    def _list(self, depth: int) -> Any:
        """Return a list or a tuple; parentheses around a value change nothing."""
        closing = "]" if self._skips("[") else ")"
        if closing == ")":
            self._expect("(")
        items, comma = list[Any](), False
        while not self._skips(closing):
            items.append(self._value(depth + 1))
            comma = self._skips(",")
            if not comma:
                self._expect(closing)
                break
        return items[0] if closing == ")" and len(items) == 1 and not comma else items

    def _braces(self, depth: int) -> Any:
        """Return a dictionary, or a set as a list. Braces around a dictionary mean nothing: some models double them."""
        self._expect("{")
        pairs: dict[str, Any] = {}
        items: list[Any] = []
        while not self._skips("}"):
            item = self._value(depth + 1)
            if self._skips(":"):
                pairs[str(item)] = self._value(depth + 1)
            else:
                items.append(item)
            if not self._skips(","):
                self._expect("}")
                break
        if pairs and items:
            raise ValueError("neither a dictionary nor a set")
        return pairs if not items else items[0] if len(items) == 1 and isinstance(items[0], dict) else items

    def _next(self) -> str:
        """Return the next character that is no white space; "" at the end."""
        gap = _GAP.match(self._text, self._at)
        self._at = gap.end() if gap else self._at
        return self._text[self._at : self._at + 1]

    def _skips(self, character: str) -> bool:
        is_next = self._next() == character
        self._at += is_next
        return is_next

    def _expect(self, character: str) -> None:
        if not self._skips(character):
            raise ValueError(f"{character} is missing")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._next()
        match = pattern.match(self._text, self._at)
        if not match:
            raise ValueError("something else")
        self._at = match.end()
        return match[0]

    def _end(self) -> None:
        if self._next():
            raise ValueError("more follows")


def _string(spelled: str) -> str:
    """Return the text of a string in JSON or Python, which read some escapes differently."""
    try:
        return str(json.loads(spelled, strict=False))
    except ValueError:
        pass
    raw, body = spelled[0] in "rR", spelled.removeprefix("r").removeprefix("R")
    size = 3 if body[:3] in ("'''", '"' * 3) and len(body) > 5 else 1
    body = body[size:-size]
    return body if raw else _ESCAPE.sub(_escaped, body)


def _escaped(match: re.Match[str]) -> str:
    code: str = match[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    return chr(int(code, 8)) if code[0] in "01234567" else str(match[0])


def _word(word: str) -> Any:
    """Return the value of a constant or a number; any other name is a text without its quotes."""
    if word in _WORDS:
        return _WORDS[word]
    if word.isidentifier():
        return word
    try:
        return int(word, 0)
    except ValueError:
        number = float(word)
    if not abs(number) < float("inf") or word.lstrip("+-").isdigit():  # 007 is no number in Python
        raise ValueError("JSON has no such number")
    return number


_QUOTE = '<|"|>'
_BARE = re.compile(r"[^\s{}\[\],:][^{}\[\],:]*")


def gemma_calls(text: str, tools: Schemas) -> list[Call]:
    """Return the call in `call:f{a:<|"|>x<|"|>,b:[1,2]}`, whose keys have no quotes."""
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    parts = (brace + rest).split(_QUOTE)
    parts[0::2] = [_BARE.sub(_gemma_word, part) for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    arguments = parsed("".join(parts))
    return [(name.strip(), arguments)] if isinstance(arguments, dict) else []


def _gemma_word(match: re.Match[str]) -> str:
    word = match[0].rstrip()
    is_key = match.string.startswith(":", match.end())
    return json.dumps(word) if is_key or parsed(word) is None and word != "null" else word


def json_types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows at its top; `string` among them if it names none."""
    if not isinstance(schema, dict):
        return {"string"}
    options = [option for key in ("anyOf", "oneOf") for option in schema.get(key) or ()]
    named = schema.get("type")
    if named is None and options:
        return set().union(*map(json_types, options))
    if named is None and isinstance(schema.get("enum"), list):
        return {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    if named is None and "$ref" in schema:
        return {"object"}
    return {named} if isinstance(named, str) else set(named or {"string"})


BLOCKS: Mapping[str, Callable[[str, Schemas], list[Call]]] = {"python": python_calls, "gemma": gemma_calls}
