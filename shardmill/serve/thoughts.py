"""Thoughts: what a model writes before its answer, between marks that the checkpoint's chat template knows.

Some templates open the thought at the end of the prompt, otherwise the model writes both marks. An answer that does not
begin with a thought has none: marks further on are text.
"""

from __future__ import annotations

import math
from typing import Literal

from shardmill.serve.tool_reader import AnswerDelta, CallReader, mark_begun
from shardmill.serve.tools import ToolFormat
from shardmill.templates.thoughts import ThoughtFormat


class ThoughtReader:
    """Splits one answer into its thought and the text after it. However the answer is cut into pieces, both are equal.

    White space around the thought is left out. A call may end a thought too: Qwen3.5 sometimes forgets the mark.

    Args:
        form: the marks.
        opened: whether the prompt has opened the thought.
        tools: how the model writes calls, if it may call functions.

    Attributes:
        span: offsets in the answer's text between the marks, in characters; (0, 0) without a thought.
    """

    def __init__(self, form: ThoughtFormat, *, opened: bool, tools: ToolFormat | None = None) -> None:
        self._begin, self._end = form.begin, form.end
        call = tools.around[0] + tools.call.partition("NAME")[0] if tools else ""
        self._ends = (form.end, call) if tools and call.startswith(tools.begin) else (form.end,)
        self._place: Literal["before", "begun", "inside", "gap", "after"] = "begun" if opened else "before"
        self._text = ""
        self._space: list[str] = []  # white space that belongs to what follows it, if anything does
        self._length = 0  # characters of the answer so far
        self.span: tuple[int, float] = (0, math.inf if opened else 0)

    def push(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Return what became certain of the thought, and of the text after it, with the answer's next text.

        Args:
            text: the next text.
            ended: whether the answer ends with it.
        """
        self._text += text
        self._length += len(text)
        if self._place == "before":
            shown = self._text.lstrip()
            self._space.append(self._text[: len(self._text) - len(shown)])
            self._text = shown
            if shown.startswith(self._begin):
                self._place, self._text = "begun", shown.removeprefix(self._begin)
                self._space.clear()
                self.span = self._length - len(self._text), math.inf
            elif ended or not self._begin.startswith(shown):
                self._place, self._text = "after", self._spaced(shown)
        thought = self._thought(ended) if self._place in ("begun", "inside") else ""
        if self._place == "gap":
            self._text = self._text.lstrip()
            self._place = "after" if self._text else "gap"
        rest = ""
        if self._place == "after":
            rest, self._text = self._text, ""
        return thought, rest

    def _spaced(self, text: str) -> str:
        """Return text after the white space before it."""
        spaced = "".join([*self._space, text])
        self._space.clear()
        return spaced

    def _thought(self, ended: bool) -> str:
        """Return what became certain of the thought. White space at its end waits for the next text."""
        if self._place == "begun":
            self._text = self._text.lstrip()
        places = [at for mark in self._ends if (at := self._text.find(mark)) >= 0]
        at = min(places, default=len(self._text) - (0 if ended else mark_begun(self._text, self._ends)))
        shown = self._text[:at].rstrip()
        thought = self._spaced(shown) if shown else ""
        if places:
            self.span = self.span[0], self._length - len(self._text) + at
            self._place, self._text = "gap", self._text[at:].removeprefix(self._end)
        else:
            self._space.append(self._text[len(shown) : at])
            self._place, self._text = "inside" if thought else self._place, self._text[at:]
        return thought


def answer_deltas(
    thoughts: ThoughtReader | None, calls: CallReader | None, text: str, *, ended: bool
) -> list[AnswerDelta]:
    """Return what became certain of an answer with its next text.

    Args:
        thoughts: splits off the thought, if the model thinks between marks.
        calls: reads function calls, or harmony's channels.
        text: the next text.
        ended: whether the answer ends with it.
    """
    thought, text = thoughts.push(text, ended=ended) if thoughts else ("", text)
    deltas = [AnswerDelta("thought", thought)] if thought else []
    if calls is not None:
        return deltas + calls.push(text) + (calls.finish() if ended else [])
    return deltas + ([AnswerDelta("content", text)] if text else [])
