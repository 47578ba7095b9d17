"""What a chat template puts around messages: derived from probe conversations, and proven on others.

A runtime without Jinja writes a conversation by this format. A template that does more has no format.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import interrupt
from shardmill.checkpoint.tokenizer import (
    ODD_TEXTS,
    TOKENIZER,
    difference,
    every_added_token,
    names_class,
    read_tokenizer,
    transformers_tokenizer,
)
from shardmill.errors import CheckpointError, ShardmillError
from shardmill.files import parse_json
from shardmill.printable import first_line
from shardmill.templates.render import RenderError, limit_memory, own_template, rendered, turn_end

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Talk = Sequence[Mapping[str, Any]]
Render = Callable[[Talk, bool], str]  # (messages, whether an answer begins at the end) -> text
SECONDS = 5.0  # for one conversation; templates in use take milliseconds
PROBE_SECONDS = 300.0  # for importing transformers and all probes on a busy machine
LONGEST = 1 << 16  # characters of a format as JSON
CHANGING = re.compile(r"strftime_now|\|\s*random|lipsum")  # what makes a template write something else each day
MAIN = "import sys; from shardmill.templates.chat_format import main; main(sys.argv[1])"
ASKED, ANSWERED, AGAIN, TOLD = "Qa7xv", "Qb7xv", "Qc7xv", "Qd7xv"  # occur once in a rendered probe


class UnprovenError(ShardmillError):
    """A template that no format describes."""


@dataclass(frozen=True)
class Around:
    """What stands around the messages of a role.

    Attributes:
        before: the text before a message.
        after: the text after a message.
        strip: whether a message loses the white space at its ends.
    """

    before: str
    after: str
    strip: bool


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation becomes text: a system message if there is one, then questions and answers in turn.

    Attributes:
        begin: the text before everything else.
        without_system: the text in place of a system message.
        system: what stands around a system message; None if there is no place for one.
        user: what stands around a question.
        assistant: what stands around an answer.
        generate: the text after which an answer begins.
    """

    begin: str
    without_system: str
    system: Around | None
    user: Around
    assistant: Around
    generate: str

    def text(self, talk: Talk) -> str:
        """Return the text of a conversation, up to where an answer begins."""
        told = self.begin if talk[0]["role"] == "system" else self.begin + self.without_system
        return told + "".join(self._turn(**message) for message in talk) + self.generate

    def _turn(self, role: str, content: str) -> str:
        around = {"system": self.system, "user": self.user, "assistant": self.assistant}[role]
        assert around is not None
        return around.before + (content.strip() if around.strip else content) + around.after

    def as_json(self) -> dict[str, Any]:
        """Return the format as model.json has it, without `stop`."""

        def turn(around: Around) -> dict[str, Any]:
            stripped = {"strip": True} if around.strip else {}
            return {"before": around.before, "after": around.after, **stripped}

        return {
            "begin": self.begin,
            **({"without_system": self.without_system} if self.without_system else {}),
            **({"system": turn(self.system)} if self.system else {}),
            "user": turn(self.user),
            "assistant": turn(self.assistant),
            "generate": self.generate,
        }


def derive(render: Render) -> ChatFormat:
    """Return the format of a template, with a place for a system message if the template treats one plainly.

    Raises:
        UnprovenError: no format writes what the template writes.
    """
    try:
        candidate = _derive(render, with_system=True)
        _prove(candidate, render)
    except (UnprovenError, RenderError):
        try:
            candidate = _derive(render, with_system=False)
            _prove(candidate, render)
        except RenderError as error:
            raise UnprovenError(f"it refuses a plain conversation: {error}") from error
    return candidate


def _derive(render: Render, *, with_system: bool) -> ChatFormat:
    """Return the only format that a template can have. Raise UnprovenError or RenderError if it has none."""
    question = [_said("user", ASKED)]
    talk = [*question, _said("assistant", ANSWERED), _said("user", AGAIN)]
    first, last = _around(render(question, True), ASKED)
    begins, to_answer, to_question, ends = _around(render(talk, True), ASKED, ANSWERED, AGAIN)
    if (begins, ends) != (first, last):
        raise UnprovenError("the first question or the last one depends on the others")
    after_question = commonprefix([last, to_answer, _end_of(render, question, ASKED)])
    after_answer = commonprefix([to_question, _end_of(render, talk[:2], ANSWERED)])
    before_question = [first, to_question]
    told, after_told = "", ""
    if with_system:
        told, after_told, ends = _around(render([_said("system", TOLD), *question], True), TOLD, ASKED)
        if ends != last:
            raise UnprovenError("the end of a question depends on the system message")
        before_question.append(after_told)
    before = to_question.removeprefix(after_answer)
    if not all(text.endswith(before) for text in before_question):
        before = commonprefix([text[::-1] for text in before_question])[::-1]
    opening = first.removesuffix(before)
    begin = commonprefix([opening, told]) if with_system else opening
    system = None
    if with_system:
        system = Around(told.removeprefix(begin), after_told.removesuffix(before), _strips(render, "system"))
    return ChatFormat(
        begin=begin,
        without_system=opening.removeprefix(begin),
        system=system,
        user=Around(before, after_question, _strips(render, "user")),
        assistant=Around(
            to_answer.removeprefix(after_question), to_question.removesuffix(before), _strips(render, "assistant")
        ),
        generate=last.removeprefix(after_question),
    )


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _around(text: str, *marks: str) -> list[str]:
    """Return the pieces of a text before, between and after marks. Raise UnprovenError if the marks are not there."""
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            raise UnprovenError("a message is not written once, in its place")
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


def _end_of(render: Render, talk: Talk, mark: str) -> str:
    """Return what follows the last message where no answer begins; "" if the template refuses that."""
    try:
        return _around(render(talk, False), mark)[-1]
    except (RenderError, UnprovenError):
        return ""


def _strips(render: Render, role: str) -> bool:
    """Return whether a template may strip the messages of a role."""
    padded = f" \n{TOLD}\n "
    talk = [_said("user", ASKED), _said("assistant", ANSWERED), _said("user", AGAIN)]
    place = {"system": 0, "user": 0, "assistant": 1}[role]
    said = _said(role, padded)
    return padded not in render([said, *talk] if role == "system" else [*talk[:place], said, *talk[place + 1 :]], True)


def _prove(candidate: ChatFormat, render: Render) -> None:
    """Raise UnprovenError if a format and a template write a conversation otherwise."""
    for talk in _probes(with_system=candidate.system is not None):
        if candidate.text(talk) != render(talk, True):
            raise UnprovenError(f"it is not plain: it changes or omits a message, such as {json.dumps(talk)}")


def _probes(*, with_system: bool) -> Iterator[Talk]:
    """Yield conversations: every text in every role, several turns, with a system message and without."""
    length = len(ODD_TEXTS)
    for place, text in enumerate(ODD_TEXTS):
        another = ODD_TEXTS[(place + 5) % length]
        asked, answered, again = _said("user", text), _said("assistant", text), _said("user", another)
        talks = [[asked], [asked, answered, again], [again, answered, asked]]
        yield from talks
        if with_system:
            yield from ([_said("system", text), *talk] for talk in talks)
            yield from ([_said("system", another), *talk] for talk in talks)
    many = [
        _said("user" if turn % 2 == 0 else "assistant", text) for turn, text in enumerate([*ODD_TEXTS, *ODD_TEXTS[:7]])
    ]
    yield many
    if with_system:
        yield [_said("system", ODD_TEXTS[2]), *many]


def chat_format(source: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the format of a checkpoint's chat template for model.json, or None and the reason.

    The template is a stranger's program. It runs in another process, which has a limit of time and of memory.

    Args:
        source: the checkpoint's folder, which has a chat template.

    Raises:
        CheckpointError: tokenizer.json gives a conversation's text other tokens than transformers does.
    """
    command = [sys.executable, "-c", MAIN, str(source)]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    )
    interrupt.ends_with_this_process(child)
    try:
        written, _ = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return None, "its template takes too long"
    finally:
        child.kill()
        child.wait()
    lines = written.decode(errors="replace").splitlines()
    if child.returncode or not lines or len(lines[-1]) > LONGEST:
        return None, "its template needs too much time or memory"
    answer = parse_json(lines[-1])
    if answer["differs"]:
        raise CheckpointError(answer["differs"])
    return answer["chat"], answer["why"]


def main(source: str) -> None:
    """Print the format of a checkpoint's chat template, or why it has none, as one line of JSON."""
    try:
        answer = _probed(Path(source))
    except Exception as error:  # a checkpoint may cause any exception
        answer = {"chat": None, "why": first_line(error), "differs": ""}
    print(json.dumps(answer))


def _probed(source: Path) -> dict[str, Any]:
    """Return the format of a checkpoint's chat template, or why it has none, and where its texts' tokens differ."""
    from transformers import AutoTokenizer

    theirs, template = AutoTokenizer.from_pretrained(source, trust_remote_code=False), own_template(source)
    ours = read_tokenizer(source / TOKENIZER)
    judge = theirs if names_class(source) else transformers_tokenizer(source)
    texts: list[str] = []
    limit_memory()

    def render(talk: Talk, answers: bool) -> str:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # ends the process, whatever it does
        fine, text = rendered(theirs, [dict(message) for message in talk], template, answers)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not fine:
            raise RenderError(text)
        texts.append(text)
        return text

    try:
        described, why = _described(json.dumps(template or theirs.chat_template), ours, render), ""
    except Exception as error:  # a checkpoint may cause any exception
        described, why = None, first_line(error)
    texts = [*dict.fromkeys(texts), every_added_token(judge)] if texts else []
    return {"chat": described, "why": why, "differs": difference(source / TOKENIZER, ours, judge, texts, special=False)}


def _described(template: str, ours: Tokenizer, render: Render) -> dict[str, Any]:
    """Return the format of a template, with the token that ends an answer."""
    if CHANGING.search(template):
        render([_said("user", ASKED)], True)  # for its tokens
        raise UnprovenError("it writes the date, or something at random")
    derived = derive(render)
    end = turn_end(lambda talk: render(talk, True), ours)
    return {**derived.as_json(), "stop": [] if end is None else [end]}
