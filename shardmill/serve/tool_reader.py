"""A reader of function calls in a model's answer, as its text arrives.

What is no call stays text, so nothing of an answer is lost. `tools` describes the formats.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardmill.serve.call_texts import BLOCKS, object_call
from shardmill.serve.tagged_calls import LONGEST_TAG, TAG, FunctionReader
from shardmill.serve.tools import CALL_KEYS, END_OF_FUNCTION, FUNCTION, LONGEST_NAME, Schemas, ToolFormat


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
_PIECE = 1024  # characters that are read at a time: what is searched again and again must be short
_OPENING = 64  # white space and brackets at most, around the mark with which an answer opens
# What is tried again with each piece of an answer repeats nothing without end.
_HEAD = re.compile(
    r'\{\s{0,20}"name"\s{0,20}:\s{0,20}"([^"\\]{1,64})"\s{0,20},'
    r'\s{0,20}"(?:arguments|parameters)"\s{0,20}:\s{0,20}(?=\{\s{0,20}["}])'
)
_LONGEST_HEAD = 256
_FIRST_KEY = re.compile(r'\{\s*"(' + "|".join(CALL_KEYS) + ')"')
_TITLE = re.compile(rf"([\w.-]{{1,{LONGEST_NAME}}})(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s{{0,20}}(?=\{{)")
_HALF_TITLE = re.compile(rf"[\w.-]{{1,{LONGEST_NAME}}}(?:\[\w{{0,7}}(?:\]\w{{0,64}})?){{0,2}}\s{{0,20}}")
_OBJECT = re.compile(r'\s{0,20}\{\s{0,20}["}]')
_HALF_OBJECT = re.compile(r"\s{0,20}(?:\{\s{0,20})?")
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
        self._kept: list[str] = []  # what `_pass_on` keeps
        self._space: list[str] = []  # white space that is told only if text follows
        self._after_call = False
        self._pieces: list[AnswerDelta] = []
        self.calls, self.complete = 0, True
        self._length, self.thoughts = 0, list[tuple[int, float]]()
        self._steps = self._messages() if form.style == "harmony" else self._answer()

    def push(self, text: str) -> list[AnswerDelta]:
        """Return what became certain with the answer's next text."""
        for at in range(0, max(len(text), 1), _PIECE):
            self._text += text[at : at + _PIECE]
            self._length += len(text[at : at + _PIECE])
            next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[AnswerDelta]:
        """Return the rest, at the end of the answer."""
        self._ended = True
        for _ in self._steps:
            pass
        if not self.calls and (space := "".join(self._space)):
            self._pieces.append(AnswerDelta("content", space))
        return self.push("")

    def _answer(self) -> Steps:
        """Read text and calls in turns."""
        form = self._form
        if form.unmarked:
            yield from self._unmarked_calls()
        marks = (form.begin, FUNCTION) if form.style == "xml" else (form.begin,)  # some models leave out the first
        while (yield from self._pass_on("content", *marks)):
            if not self._text.startswith(form.begin) or form.begin == FUNCTION:
                yield from self._tagged_calls("", marked=False)
                continue
            self._text = self._text.removeprefix(form.begin)
            if form.style in BLOCKS:
                yield from self._block(form.begin)
            elif form.tagged:
                yield from self._tagged_calls(form.begin, marked=True)
            else:
                yield from self._json_calls(form.begin, form.end, marked=True)
        return True

    def _unmarked_calls(self) -> Steps:
        """Read calls that begin an answer without the format's mark."""
        while True:
            text = self._text.lstrip(_SPACE)
            for begin, end in self._form.unmarked:
                rest = text.removeprefix(begin).lstrip(_SPACE + _LIST)
                opening = len(self._text) - len(rest)
                if text.startswith(begin) and rest.startswith("{") and opening <= _OPENING:
                    opened, self._text = self._text[:opening], rest
                    return (yield from self._json_calls(opened, end, marked=False))
            openings = (begin for begin, _ in self._form.unmarked)
            if self._ended or len(self._text) > _OPENING:
                return False
            if not any(one.startswith(text) or text.rstrip(_SPACE + _LIST) == one for one in openings):
                return False
            yield

    def _messages(self) -> Steps:
        """Read harmony's messages: a header that names channel and recipient, then a body."""
        while (yield from self._pass_on("kept", "<|message|>")):
            self._text = self._text.removeprefix("<|message|>")
            header = self._taken()
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
        rest = self._taken()
        if "<|" not in rest:  # not harmony at all
            self._tell(rest)
        return True

    def _taken(self) -> str:
        """Return what was kept since the last time."""
        text = "".join(self._kept)
        self._kept.clear()
        return text

    def _pass_on(self, kind: Literal["content", "thought", "kept", "nothing"], *marks: str) -> Steps:
        """Add text until the rest begins with one of `marks`; return False if the answer ends before."""
        while True:
            places = [at for mark in marks if (at := self._text.find(mark)) >= 0]
            end = min(places, default=len(self._text) - (0 if self._ended else mark_begun(self._text, marks)))
            text, self._text = self._text[:end], self._text[end:]
            if kind == "content":
                self._tell(text)
            elif kind == "kept":
                self._kept.append(text)
            elif kind == "thought" and text:
                self._pieces.append(AnswerDelta("thought", text))
            if places or self._ended:
                return bool(places)
            yield

    def _tell(self, text: str) -> None:
        """Add text. White space at its end waits for more text, because models write line breaks around calls."""
        shown = text.rstrip()
        if not shown:
            self._space += [text] if text else []
            return
        before, self._space = "".join(self._space), [text[len(shown) :]]
        shown = (before + shown).lstrip() if self._after_call else before + shown
        self._after_call = False
        self._pieces.append(AnswerDelta("content", shown))

    def _begin(self, name: str) -> None:
        self._space, self._after_call = [], True
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
        form, before, skipped = self._form, self.calls, [opened]
        while True:
            rest = self._text.lstrip(_SPACE + (form.skipped if marked else form.skipped + _LIST))
            skipped.append(self._text[: len(self._text) - len(rest)])
            self._text = rest
            title = _TITLE.match(rest) if form.titled else None
            if rest.startswith("{"):
                goes_on = yield from self._object("".join(skipped), end, marked)
            elif title:
                self._text = rest[title.end() :]
                goes_on = yield from self._arguments_of(title[1])
            elif end and rest.startswith(end):
                self._text = rest.removeprefix(end)
                skipped.append(end)
                break
            elif self._ended and self.calls > before and end.startswith(rest):  # the answer was cut in its last mark
                self._text = ""
                break
            elif not self._ended and (end.startswith(rest) or (form.titled and _HALF_TITLE.fullmatch(rest))):
                yield
                continue
            else:
                break
            if not goes_on:
                return False
            skipped = []
        if self.calls == before:
            self._tell("".join(skipped))
        return True

    def _object(self, opened: str, end: str, marked: bool) -> Steps:
        """Read `{"name": ..., "arguments": {...}}`. An object that is no call is text, after what has `opened` it.

        See `_json_calls` for the arguments.
        """
        value = _Value()
        while not value.over and not self._ended and len(self._text) < _LONGEST_HEAD and not _HEAD.match(self._text):
            value.read(self._text[value.at :])
            if not value.over:
                yield
        head = _HEAD.match(self._text)
        if head and (marked or head[1] in self._tools):
            self._text = self._text[head.end() :]
            yield from self._arguments_of(head[1])
            yield from self._pass_on("nothing", "}", *filter(None, [end]))  # further keys
            self._text = self._text.removeprefix("}")
            return True
        value, read = _Value(), list[str]()
        while True:
            before = value.at
            value.read(self._text)
            size = value.at - before
            read.append(self._text[:size])
            self._text = self._text[size:]
            if value.over or self._ended:
                break
            yield
        text = "".join(read)
        call = object_call(text)
        if call is None or not (marked or (_FIRST_KEY.match(text) and call[0] in self._tools)):
            self._tell(opened + text)
            return False
        self._call(*call)
        return True

    def _arguments_of(self, name: str) -> Steps:
        """Read a call's arguments, an object, and pass each part on."""
        self._begin(name)
        value = _Value()
        while not self.complete:
            before = value.at
            self._argue(value.read(self._text))
            self._text = self._text[value.at - before :]
            self.complete = value.over
            if self._ended:
                break
            if not self.complete:
                yield
        return True

    def _block(self, opened: str) -> Steps:
        """Read all calls up to the format's end at once, since their arguments must be translated into JSON."""
        closed = yield from self._pass_on("kept", self._form.end)
        body, end = self._taken(), self._form.end if closed else ""
        self._text = self._text.removeprefix(end)
        calls = BLOCKS[self._form.style](body, self._tools)
        for call in calls:
            self._call(*call)
        if not calls:
            self._tell(opened + body + end)
        return True

    def _tagged_calls(self, opened: str, *, marked: bool) -> Steps:
        """Read functions in tags up to the format's end, or calls in JSON: some models write either in its marks.

        See `_function` for the arguments.
        """
        before, skipped = self.calls, [opened]
        while True:
            rest = self._text.lstrip(_SPACE)
            skipped.append(self._text[: len(self._text) - len(rest)])
            self._text = rest
            if rest.startswith(FUNCTION):
                if not (yield from self._function("".join(skipped), marked=marked)):
                    return False
                skipped = []
            elif self.calls > before and rest.startswith(self._form.end):
                self._text = rest.removeprefix(self._form.end)
                return True
            elif self._ended and self.calls > before and self._form.end.startswith(rest):
                self._text = ""
                return True
            elif not self._ended and (FUNCTION.startswith(rest) or self._form.end.startswith(rest)):
                yield
            elif self.calls > before:
                return True
            else:
                return (yield from self._json_calls("".join(skipped), self._form.end, marked=True))

    def _function(self, opened: str, *, marked: bool) -> Steps:
        """Read a function in tags; return whether it is a call. What is no call is text, after what has `opened` it.

        Args:
            opened: the text before it.
            marked: whether it stands behind the format's mark; otherwise only a known function is a call.
        """
        while not (tag := TAG.match(self._text)) and not self._ended:
            if len(self._text) > LONGEST_TAG or any(character in self._text[1:] for character in "<>\n"):
                break
            yield
        if not tag or not tag[3] or not (marked or tag[3] in self._tools):
            self._tell(opened + FUNCTION)
            self._text = self._text.removeprefix(FUNCTION)
            return False
        self._text = self._text[tag.end() :]
        while not self._ended and _HALF_OBJECT.fullmatch(self._text):
            yield
        if _OBJECT.match(self._text):
            self._text = self._text.lstrip()
            yield from self._arguments_of(tag[3])
            yield from self._pass_on("nothing", END_OF_FUNCTION, *filter(None, [self._form.end]))
            self._text = self._text.removeprefix(END_OF_FUNCTION)
            return True
        reader = FunctionReader(tag[3], self._tools, lines=self._form.lines)
        while not reader.read(self._text, ended=self._ended) and not self._ended:
            self._text = ""
            yield
        self._text = reader.rest if reader.over else ""
        if reader.arguments is None:
            self._tell(opened + tag[0] + reader.raw + ("" if reader.over else reader.rest))
            return False
        self._call(tag[3], reader.arguments)
        return True


_PART = re.compile(r"""[^"'\\{}\[\]\x00-\x1f]+|.""", re.DOTALL)


class _Value:
    """The end of a JSON object that comes in pieces.

    Attributes:
        at: characters read.
        over: whether the object has ended, at `at`.
    """

    def __init__(self) -> None:
        self.at, self.over = 0, False
        self._depth, self._quote, self._escaped = 0, "", False
        self._single: bool | None = None  # whether strings may stand in single quotes: the first key tells

    def read(self, text: str) -> str:
        """Read on, and return the object's part of the text, with line breaks in strings as JSON has them."""
        told: list[str] = []
        for part in _PART.finditer(text):
            piece = part[0]
            self.at += len(piece)
            told.append(json.dumps(piece)[1:-1] if self._quote and piece < " " else piece)
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = piece == "\\"
                self._quote = "" if piece == self._quote else self._quote
            else:
                self._structure(piece)
                if self.over:
                    break
        return "".join(told)

    def _structure(self, piece: str) -> None:
        """Take a piece outside of strings."""
        if self._depth and self._single is None and piece != "{" and not piece.isspace():
            self._single = piece == "'"
        if piece == '"' or (piece == "'" and self._single):
            self._quote = piece
        self._depth += (piece in ("{", "[")) - (piece in ("}", "]"))
        self.over = piece in ("}", "]") and self._depth <= 0


def mark_begun(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that begins a mark."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
