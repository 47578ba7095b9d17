"""The format of a chat template, derived from probe conversations and proven on others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from os.path import commonprefix
from typing import Any

from shardmill.checkpoint.tokenizer import ODD_TEXTS
from shardmill.errors import ShardmillError
from shardmill.templates.form import Around, ChatFormat, Clock, Edit, Strip, Talk
from shardmill.templates.render import RenderError
from shardmill.templates.thoughts import CHANNEL, FORMATS, find_thoughts, thought_fields

# (messages, whether an answer begins at the end, the date) -> text
Render = Callable[[Talk, bool, Clock], str]
ASKED, ANSWERED, AGAIN, TOLD = "Qa7xv", "Qb7xv", "Qc7xv", "Qd7xv"  # occur once in a rendered probe
THOUGHT = "Qe7xv"
DAYS = (date(2024, 2, 29), date(2026, 11, 1), date(2031, 12, 23))
DATED = re.compile(r"⟦([^⟦⟧]*)⟧")  # what stands for a date in a probe
DIRECTIVES = re.compile(r"(?:%[YmdbBAay]|[^%])*")  # the parts of a date that a runtime can write
RANDOM = re.compile(r"\|\s*random|lipsum")
LITERALS = 64  # texts that a template may compare messages with
MARK = re.compile(r"(?=.*[^\w\s]).{4,}", re.DOTALL)  # of these, what people hardly write: no plain word, no punctuation
STRIPS = (
    None,
    Strip(),
    *(Strip(ends, characters) for ends in ("start", "end", "both") for characters in ("\n", "")),
)


class UnprovenError(ShardmillError):
    """A template that no format describes."""


@dataclass(frozen=True)
class Freedom:
    """What a format may say.

    Attributes:
        edits: what a template may leave out of messages.
        literals: texts that a template may interpret.
        more: whether it may say more than `chat` of model.json: dates, thoughts, empty system messages.
    """

    edits: Sequence[Edit]
    literals: Sequence[str]
    more: bool


PLAIN = Freedom((Edit(), Edit(Strip())), (), more=False)


def derive(render: Render, template: str = "") -> tuple[ChatFormat | None, ChatFormat | None]:
    """Return a template's plain format, which `chat` of model.json can say, and its whole one, for `conversation`.

    Either is None if the template has none; the whole one also if it says no more than the plain one.

    Args:
        render: renders a conversation with the template.
        template: the template's text.

    Raises:
        UnprovenError: no format writes what the template writes.
    """
    if RANDOM.search(template):
        raise UnprovenError("it writes something at random")
    marks = [form.end for form in FORMATS if form.end in template]
    edits = [Edit(strip) for strip in STRIPS]
    edits += [Edit(strip, mark, after) for mark, strip, after in product(marks, STRIPS, STRIPS)]
    plain = None
    with suppress(UnprovenError):
        plain = _found(render, PLAIN)
    try:
        whole = _found(render, Freedom(edits, _compared(template), more=True))
    except UnprovenError:
        if plain is None:
            raise
        return plain, None
    whole = replace(whole, thoughts=find_thoughts(template), channels=CHANNEL in template)
    return plain, whole if whole != plain else None


def _found(render: Render, free: Freedom) -> ChatFormat:
    """Return the format of a template, with a place for a system message if the template has one."""
    try:
        candidate = _derive(render, free, with_system=True)
        _prove(candidate, render, thoughts=free.more)
    except (UnprovenError, RenderError):
        try:
            candidate = _derive(render, free, with_system=False)
            _prove(candidate, render, thoughts=free.more)
        except RenderError as error:
            raise UnprovenError(f"it refuses a plain conversation: {error}") from error
    return candidate


def _compared(template: str) -> list[str]:
    """Return the texts that a template compares with others, looks for or replaces."""
    from jinja2 import Environment, TemplateSyntaxError, nodes

    from shardmill.templates.render import GENERATION

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    except TemplateSyntaxError:
        return []
    texts = dict[str, None]()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        for text in node.find_all(nodes.Const):
            if isinstance(text.value, str) and MARK.fullmatch(text.value.strip()):
                texts[text.value] = None
    return list(texts)[:LITERALS]


def _derive(render: Render, free: Freedom, *, with_system: bool) -> ChatFormat:
    """Return the only format that a template can have. Raise UnprovenError or RenderError if it has none."""

    def marked(directives: str) -> str:
        if not free.more or not DIRECTIVES.fullmatch(directives):
            raise UnprovenError("it writes the date or the time in a way that a runtime can't")
        return f"⟦{directives}⟧"

    def written(talk: Talk, answers: bool = True) -> str:
        return render(talk, answers, marked)

    question = [_said("user", ASKED)]
    talk = [*question, _said("assistant", ANSWERED), _said("user", AGAIN)]
    first, last = _around(written(question), ASKED)
    begins, to_answer, to_question, ends = _around(written(talk), ASKED, ANSWERED, AGAIN)
    if (begins, ends) != (first, last):
        raise UnprovenError("the first question or the last one depends on the others")
    after_question = commonprefix([last, to_answer, _end_of(written, question, ASKED)])
    after_answer = commonprefix([to_question, _end_of(written, talk[:2], ANSWERED)])
    before_question = [first, to_question]
    told, after_told = "", ""
    if with_system:
        told, after_told, ends = _around(written([_said("system", TOLD), *question]), TOLD, ASKED)
        if ends != last:
            raise UnprovenError("the end of a question depends on the system message")
        before_question.append(after_told)
    before = to_question.removeprefix(after_answer)
    if not all(text.endswith(before) for text in before_question):
        before = commonprefix([text[::-1] for text in before_question])[::-1]
    opening = first.removesuffix(before)
    begin = commonprefix([opening, told]) if with_system else opening
    system = Around(told.removeprefix(begin), after_told.removesuffix(before)) if with_system else None
    form = ChatFormat(
        begin=begin,
        without_system=opening.removeprefix(begin),
        system=_edited(system, "system", written, free) if system else None,
        user=_edited(Around(before, after_question), "user", written, free),
        assistant=_edited(
            Around(to_answer.removeprefix(after_question), to_question.removesuffix(before)), "assistant", written, free
        ),
        generate=last.removeprefix(after_question),
    )
    dates = {mark[0]: mark[1] for mark in DATED.finditer(json.dumps(form.as_json(), ensure_ascii=False))}
    return replace(form, dates=dates)


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


def _end_of(written: Callable[[Talk, bool], str], talk: Talk, mark: str) -> str:
    """Return what follows the last message where no answer begins; "" if the template refuses that."""
    try:
        return _around(written(talk, False), mark)[-1]
    except (RenderError, UnprovenError):
        return ""


def _edited(around: Around, role: str, written: Callable[[Talk], str], free: Freedom) -> Around:
    """Return how a template writes a role's messages: what it leaves out of a message, and what it interprets."""
    thought = thought_fields(THOUGHT) if free.more else {}
    talk = [_said("user", ASKED), _said("assistant", ANSWERED) | thought, _said("user", AGAIN)]
    talks = [
        [*talk[:place], _said(role, TOLD), *talk[place + (role != "system") :]]
        for place in {"system": [0], "user": [0, 2], "assistant": [1]}[role]
    ]
    ends = [_around(written(one), TOLD) for one in talks]

    def put(text: str) -> str | None:
        """Return what a message becomes; None if the template refuses it, or changes something else."""
        became = set[str | None]()
        for talk, (before, after) in zip(talks, ends, strict=True):
            try:
                whole = written([said | {"content": text} if said["content"] == TOLD else said for said in talk])
            except RenderError:
                return None
            fits = whole.startswith(before) and whole.endswith(after) and len(whole) >= len(before) + len(after)
            became.add(whole[len(before) : len(whole) - len(after)] if fits else None)
        return became.pop() if len(became) == 1 else None

    padded = f" \n{TOLD}\n "
    texts = [padded, *ODD_TEXTS]
    for mark in dict.fromkeys(edit.mark for edit in free.edits if edit.mark):
        texts += [f" \n{TOLD}{mark}\n \n{padded}{mark}{padded}", f"{mark}\n\n{padded}", f"{padded}{mark}"]
    became = {text: put(text) for text in [*texts, *(text for one in free.literals for text in _with(one, free))]}

    def differ(edit: Edit) -> list[str]:
        """Return the texts that the template interprets, so that no edit describes the result."""
        return [text for text, left in became.items() if left != edit(text) and (edit(text) or role != "system")]

    best: tuple[Edit, list[str]] | None = None
    for edit in free.edits:
        texts = differ(edit)
        odd = [one for one in free.literals if any(text in texts for text in _with(one, free))]
        if all(any(one in text for one in odd) for text in texts) and (best is None or len(odd) < len(best[1])):
            best = edit, odd
    if best is not None:
        skips = free.more and role == "system" and put("") != ""
        return replace(around, edit=best[0], skips_empty=skips, interprets=tuple(best[1]))
    raise UnprovenError(f"it is not plain: it changes or omits a message of the {role}")


def _with(literal: str, free: Freedom) -> list[str]:
    """Return messages that contain a text which a template knows, and what ends a part that the text begins."""
    closing = literal.replace("<", "</", 1)
    around = [f"{literal} b {closing}"] if closing != literal and closing in free.literals else []
    return [literal, f"a {literal} b", f"{literal} b", f"a {literal}", *around]


def _prove(candidate: ChatFormat, render: Render, *, thoughts: bool) -> None:
    """Raise UnprovenError if a format and a template write a conversation otherwise."""
    for place, talk in enumerate(_probes(with_system=candidate.system is not None, thoughts=thoughts)):
        clock = DAYS[place % len(DAYS)].strftime
        if candidate.takes(talk) and candidate.text(talk, clock) != render(talk, True, clock):
            raise UnprovenError(f"it is not plain: it changes or omits a message, such as {json.dumps(talk)}")


def _probes(*, with_system: bool, thoughts: bool) -> Iterator[Talk]:
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
        if thoughts:
            yield [asked, _said("assistant", ANSWERED) | thought_fields(THOUGHT), again]
    many = [
        _said("user" if turn % 2 == 0 else "assistant", text) for turn, text in enumerate([*ODD_TEXTS, *ODD_TEXTS[:7]])
    ]
    yield many
    if with_system:
        yield [_said("system", ODD_TEXTS[2]), *many]
