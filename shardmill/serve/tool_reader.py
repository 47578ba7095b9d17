"""A reader of function calls in a model's answer, as its text arrives.

What is no call stays text, so nothing of an answer is lost. `tools` describes the formats.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardmill.files import parse_json
from shardmill.serve.tools import CALL_KEYS, Schemas, Style, ToolFormat


@dataclass(frozen=True)
class AnswerDelta:
    """A piece of an answer, as it becomes certain.

    Attributes:
        kind: text for the reader, a thought before it, the beginning of a call, or a part of its arguments.
        text: the text; of a call, the function's name.
        index: which call, counted from 0.
        id: the call's id.
    """

    kind: Literal["content", "thought", "call", "arguments"]
    text: str
    index: int = 0
    id: str = ""


_ID = string.ascii_letters + string.digits
_SPACE = " \t\r\n"
_LIST = "[,]"  # around unmarked calls in a list
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*"(' + "|".join(CALL_KEYS) + ')"')
_TITLE = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_HALF_TITLE = re.compile(r"[\w.-]+(?:\[\w*\]?\w*)*\s*")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
Steps = Generator[None, None, bool]  # waits for more text at each step; returns whether it found what it reads


class CallReader:
    """A reader of one answer. However the text is cut into pieces, the calls are the same.

    Args:
        form: how the model writes calls.
        tools: the functions that it may call.
        parallel: False to leave out every call but the first.

    Attributes:
        calls: how many calls have begun.
        complete: whether the arguments of all calls have ended.
        thoughts: offsets of the thoughts in the answer's text, from and to, in characters.
    """

    def __init__(self, form: ToolFormat, tools: Schemas, *, parallel: bool = True) -> None:
        self._form, self._tools, self._parallel = form, tools, parallel
        self._text, self._ended = "", False
        self._space = ""  # white space that is told only if text follows
        self._after_call = False
        self._pieces: list[AnswerDelta] = []
        self.calls, self.complete = 0, True
        self._length, self.thoughts = 0, list[tuple[int, float]]()
        self._steps = self._messages() if form.style == "harmony" else self._answer()

    def push(self, text: str) -> list[AnswerDelta]:
        """Return what became certain with the answer's next text."""
        self._text += text
        self._length += len(text)
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[AnswerDelta]:
        """Return the rest, at the end of the answer."""
        self._ended = True
        for _ in self._steps:
            pass
        if not self.calls and self._space:
            self._pieces.append(AnswerDelta("content", self._space))
        return self.push("")

    def _answer(self) -> Steps:
        """Read text and calls in turns."""
        if self._form.unmarked:
            yield from self._unmarked_calls()
        while (yield from self._pass_on("content", self._form.begin)):
            self._text = self._text.removeprefix(self._form.begin)
            if self._form.style == "json":
                yield from self._json_calls(self._form.begin, self._form.end, marked=True)
            else:
                yield from self._block(self._form.begin)
        return True

    def _unmarked_calls(self) -> Steps:
        """Read calls that begin an answer without the format's mark."""
        while True:
            text = self._text.lstrip(_SPACE)
            for begin, end in self._form.unmarked:
                rest = text.removeprefix(begin).lstrip(_SPACE + _LIST)
                if text.startswith(begin) and rest.startswith("{"):
                    opened, self._text = self._text[: len(self._text) - len(rest)], rest
                    return (yield from self._json_calls(opened, end, marked=False))
            openings = (begin for begin, _ in self._form.unmarked)
            if self._ended or not any(one.startswith(text) or text.rstrip(_SPACE + _LIST) == one for one in openings):
                return False
            yield

    def _messages(self) -> Steps:
        """Read harmony's messages: a header that names channel and recipient, then a body."""
        while (yield from self._waited_for("<|message|>")):
            header, _, self._text = self._text.partition("<|message|>")
            recipient = _RECIPIENT.search(header)
            if recipient:
                yield from self._arguments_of(recipient[1])
                yield from self._pass_on("nothing", *_BODY_ENDS)
            elif "analysis" in header:
                start = self._length - len(self._text)
                yield from self._pass_on("thought", *_BODY_ENDS)
                self.thoughts.append((start, self._length - len(self._text)))
            else:
                yield from self._pass_on("content", *_BODY_ENDS)
        if "<|" not in self._text:  # not harmony at all
            self._tell(self._text)
        return True

    def _waited_for(self, mark: str) -> Steps:
        while mark not in self._text and not self._ended:
            yield
        return mark in self._text

    def _pass_on(self, kind: Literal["content", "thought", "arguments", "nothing"], *marks: str) -> Steps:
        """Add text until the rest begins with one of `marks`; return False if the answer ends before."""
        while True:
            found = [at for mark in marks if (at := self._text.find(mark)) >= 0]
            end = min(found, default=len(self._text) - (0 if self._ended else mark_begun(self._text, marks)))
            text, self._text = self._text[:end], self._text[end:]
            if kind == "content":
                self._tell(text)
            elif kind == "arguments":
                self._argue(text)
            elif kind == "thought" and text:
                self._pieces.append(AnswerDelta("thought", text))
            if found or self._ended:
                return bool(found)
            yield

    def _tell(self, text: str) -> None:
        """Add text. White space at its end waits for more text, because models write line breaks around calls."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            self._pieces.append(AnswerDelta("content", shown))

    def _begin(self, name: str) -> None:
        self._space, self._after_call = "", True
        self.calls, self.complete = self.calls + 1, False
        if self._parallel or self.calls == 1:
            number = "".join(secrets.choice(_ID) for _ in range(9))  # the only form that Mistral's templates accept
            self._pieces.append(AnswerDelta("call", name, self.calls - 1, number))

    def _argue(self, text: str) -> None:
        if text and (self._parallel or self.calls == 1):
            self._pieces.append(AnswerDelta("arguments", text, self.calls - 1))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._begin(name)
        self._argue(json.dumps(arguments, ensure_ascii=False))
        self.complete = True

    def _json_calls(self, opened: str, end: str, *, marked: bool) -> Steps:
        """Read calls in JSON, one after the other.

        Args:
            opened: the text that has opened them, which is part of the answer if no call follows.
            end: the text that ends them, or ends each call.
            marked: whether they stand behind the format's mark; otherwise only an object that begins with a key of
                CALL_KEYS and names a known function is a call.
        """
        form, before = self._form, self.calls
        while True:
            rest = self._text.lstrip(_SPACE + (form.skipped if marked else form.skipped + _LIST))
            opened, self._text = opened + self._text[: len(self._text) - len(rest)], rest
            title = _TITLE.match(rest) if form.titled else None
            if rest.startswith("{"):
                found = yield from self._object(opened, end, marked)
            elif title:
                self._text = rest[title.end() :]
                found = yield from self._arguments_of(title[1])
            elif end and rest.startswith(end):
                opened, self._text = opened + end, rest.removeprefix(end)
                break
            elif not self._ended and (end.startswith(rest) or (form.titled and _HALF_TITLE.fullmatch(rest))):
                yield
                continue
            else:
                break
            if not found:
                return False
            opened = ""
        if self.calls == before:
            self._tell(opened)
        return True

    def _object(self, opened: str, end: str, marked: bool) -> Steps:
        """Read `{"name": ..., "arguments": {...}}`. An object that is no call is text, after what has `opened` it.

        See `_json_calls` for the arguments.
        """
        value = _Value()
        while True:
            head = _HEAD.match(self._text)
            if head and (marked or head[1] in self._tools):
                self._text = self._text[head.end() :]
                yield from self._arguments_of(head[1])
                yield from self._pass_on("nothing", "}", *filter(None, [end]))  # further keys
                self._text = self._text.removeprefix("}")
                return True
            if value.read(self._text) or self._ended:
                break
            yield
        text, self._text = self._text[: value.at], self._text[value.at :]
        call = _named_call(_parsed(text))
        if call is None or not (marked or (_FIRST_KEY.match(text) and call[0] in self._tools)):
            self._tell(opened + text)
            return False
        self._call(*call)
        return True

    def _arguments_of(self, name: str) -> Steps:
        """Read a call's arguments, an object, and pass each part on."""
        self._begin(name)
        value, told = _Value(), 0
        while not self.complete:
            self.complete = value.read(self._text)
            self._argue(self._text[told : value.at])
            told = value.at
            if self._ended:
                break
            if not self.complete:
                yield
        self._text = self._text[told:]
        return True

    def _block(self, opened: str) -> Steps:
        """Read all calls up to the format's end at once, since their arguments must be translated into JSON."""
        closed = yield from self._waited_for(self._form.end)
        body, end, self._text = self._text.partition(self._form.end) if closed else (self._text, "", "")
        calls = _BLOCKS[self._form.style](body, self._tools)
        for call in calls:
            self._call(*call)
        if not calls:
            self._tell(opened + body + end)
        return True


class _Value:
    """The end of a JSON object in a growing text."""

    def __init__(self) -> None:
        self.at = 0  # characters read
        self._depth, self._quoted, self._escaped = 0, False, False

    def read(self, text: str) -> bool:
        """Read on in the text, which has grown; return whether the object has ended, at `at`."""
        while self.at < len(text):
            character = text[self.at]
            self.at += 1
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if character in "}]" and self._depth <= 0:
                    return True
        return False


def mark_begun(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that begins a mark."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


Call = tuple[str, Mapping[str, Any]]


def _named_call(found: Any) -> Call | None:
    """Return the call that a JSON object describes; some models write its arguments as a text of JSON."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return (found["name"], arguments) if isinstance(arguments, dict) else None


def _python_calls(text: str, tools: Schemas) -> list[Call]:
    """Return the calls in `[f(a=1), g(b='x')]`, or in a list of JSON objects."""
    listed = _parsed(text)
    if isinstance(listed, list):
        return [call for item in listed if (call := _named_call(item))]
    for source in (text.strip(), text.strip().replace("\n", "\\n")):  # a line break in a string is not Python's
        try:
            tree = ast.parse(source, mode="eval").body
            calls = tree.elts if isinstance(tree, ast.List) else [tree]
            return [_python_call(call) for call in calls]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return []


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError
    return ast.unparse(node.func), {str(word.arg): _python_value(word.value) for word in node.keywords}


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal; a set becomes a list, and JSON's names are known too."""
    if isinstance(node, ast.Name):
        return (
            {"true": True, "false": False, "null": None}[node.id] if node.id in ("true", "false", "null") else node.id
        )
    if isinstance(node, ast.List | ast.Set | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_python_value(key) for key in node.keys if key is not None]
        return dict(zip(map(str, keys), map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError
    return value


_QUOTE = '<|"|>'
_WORD = re.compile(r"[^\s{}\[\],:][^{}\[\],:]*")


def _gemma_calls(text: str, tools: Schemas) -> list[Call]:
    """Return the call in `call:f{a:<|"|>x<|"|>,b:[1,2]}`, whose keys have no quotes."""
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    parts = (brace + rest).split(_QUOTE)
    parts[0::2] = [_WORD.sub(_gemma_word, part) for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    arguments = _parsed("".join(parts))
    return [(name.strip(), arguments)] if isinstance(arguments, dict) else []


def _gemma_word(match: re.Match[str]) -> str:
    word = match[0].rstrip()
    is_key = match.string[match.end() :].startswith(":")
    return json.dumps(word) if is_key or _parsed(word) is None and word != "null" else word


def _xml_calls(text: str, tools: Schemas) -> list[Call]:
    """Return the calls in `<function=f><parameter=a>1</parameter></function>`; schemas tell texts from numbers."""
    calls: list[Call] = []
    for name, body in re.findall(r"<function=([^>\n]+)>(.*?)</function>", text, re.DOTALL):
        known = tools.get(name, {}).get("properties")
        schemas = known if isinstance(known, dict) else {}
        found = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        calls.append((name, {key: _xml_value(value, schemas.get(key)) for key, value in found}))
    return calls


def _xml_value(text: str, schema: Any) -> Any:
    kinds = json_types(schema)
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    value = _parsed({"True": "true", "False": "false"}.get(text, text))
    return text if value is None and text not in ("null", "None") else value


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


_BLOCKS: Mapping[Style, Callable[[str, Schemas], list[Call]]] = {
    "python": _python_calls,
    "gemma": _gemma_calls,
    "xml": _xml_calls,
}
