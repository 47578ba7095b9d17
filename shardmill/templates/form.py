"""How a conversation becomes text without Jinja: what `chat` and `conversation` of model.json say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

from shardmill.templates.thoughts import ThoughtFormat

Talk = Sequence[Mapping[str, Any]]
Clock = Callable[[str], str]  # today's date by strftime's directives


@dataclass(frozen=True)
class Strip:
    """Which ends of a text lose which characters.

    Attributes:
        ends: where characters are lost.
        characters: the characters; white space if empty.
    """

    ends: Literal["both", "start", "end"] = "both"
    characters: str = ""

    def __call__(self, text: str) -> str:
        """Return the text without the characters."""
        change = {"both": str.strip, "start": str.lstrip, "end": str.rstrip}[self.ends]
        return change(text, self.characters or None)

    def as_json(self) -> Any:
        """Return True for white space at both ends, otherwise an object."""
        if self == Strip():
            return True
        return {"ends": self.ends, **({"characters": self.characters} if self.characters else {})}


@dataclass(frozen=True)
class Edit:
    """What a template leaves out of a message.

    Attributes:
        strip: what the message loses first; None for nothing.
        mark: of a message that contains this text, only what follows its last place counts; "" for none.
        after: what is then lost of what follows the mark; None for nothing.
    """

    strip: Strip | None = None
    mark: str = ""
    after: Strip | None = None

    def __call__(self, text: str) -> str:
        """Return what is left of a message."""
        if self.strip:
            text = self.strip(text)
        if self.mark and self.mark in text:
            text = text.rpartition(self.mark)[2]
            text = self.after(text) if self.after else text
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the object of a role."""
        cut = {"mark": self.mark, **({"strip": self.after.as_json()} if self.after else {})}
        return {**({"strip": self.strip.as_json()} if self.strip else {}), **({"cut": cut} if self.mark else {})}


@dataclass(frozen=True)
class Around:
    """What a template makes of the messages of a role.

    Attributes:
        before: the text before a message.
        after: the text after a message.
        edit: what it leaves out of a message.
        skips_empty: whether a message of which nothing is left counts as none. Only of a system message.
        interprets: texts that a message must not contain, as the template does something else with them.
    """

    before: str
    after: str
    edit: Edit = Edit()
    skips_empty: bool = False
    interprets: tuple[str, ...] = ()

    def takes(self, text: str) -> bool:
        """Return whether the template does nothing else with a message."""
        return not any(one in text for one in self.interprets)

    def as_json(self) -> dict[str, Any]:
        """Return the object of a role."""
        more = {"skip_empty": self.skips_empty, "interprets": list(self.interprets)}
        texts = {"before": self.before, "after": self.after}
        return texts | self.edit.as_json() | {key: value for key, value in more.items() if value}


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation becomes text: a system message if there is one, then questions and answers in turn.

    Attributes:
        begin: the text before everything else.
        without_system: the text in place of a system message.
        system: what a system message becomes; None if there is no place for one.
        user: what a question becomes.
        assistant: what an answer becomes.
        generate: the text after which an answer begins.
        dates: parts of these texts in whose place the date stands, and strftime's directives for each.
        thoughts: the marks between which the model thinks; None if it does not.
        channels: whether an answer has channels, as harmony calls them.
    """

    begin: str
    without_system: str
    system: Around | None
    user: Around
    assistant: Around
    generate: str
    dates: Mapping[str, str] | None = None
    thoughts: ThoughtFormat | None = None
    channels: bool = False

    def text(self, talk: Talk, clock: Clock | None = None) -> str:
        """Return the text of a conversation on a day, today if left out, up to where an answer begins."""
        form = self._dated(clock or date.today().strftime)
        told = talk[0]["role"] == "system"
        if told and form.system and form.system.skips_empty and not form.system.edit(talk[0]["content"]):
            told, talk = False, talk[1:]
        begin = form.begin if told else form.begin + form.without_system
        return begin + "".join(form._turn(message["role"], message["content"]) for message in talk) + form.generate

    def takes(self, talk: Talk) -> bool:
        """Return whether the template does nothing else with a message of a conversation."""
        return all(self._around(message["role"]).takes(message["content"]) for message in talk)

    def _around(self, role: str) -> Around:
        around = {"system": self.system, "user": self.user, "assistant": self.assistant}[role]
        assert around is not None
        return around

    def _turn(self, role: str, content: str) -> str:
        around = self._around(role)
        return around.before + around.edit(content) + around.after

    def _dated(self, clock: Clock) -> ChatFormat:
        """Return the format of a day."""
        if not self.dates:
            return self

        def dated(text: str) -> str:
            for mark, directives in (self.dates or {}).items():
                text = text.replace(mark, clock(directives))
            return text

        def turn(around: Around) -> Around:
            return replace(around, before=dated(around.before), after=dated(around.after))

        return replace(
            self,
            begin=dated(self.begin),
            without_system=dated(self.without_system),
            system=turn(self.system) if self.system else None,
            user=turn(self.user),
            assistant=turn(self.assistant),
            generate=dated(self.generate),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the format as model.json has it, without `stop`."""
        thoughts = {"begin": self.thoughts.begin, "end": self.thoughts.end} if self.thoughts else None
        more = {"dates": dict(self.dates or {}), "thoughts": thoughts, "channels": self.channels}
        return {
            "begin": self.begin,
            **({"without_system": self.without_system} if self.without_system else {}),
            **({"system": self.system.as_json()} if self.system else {}),
            "user": self.user.as_json(),
            "assistant": self.assistant.as_json(),
            "generate": self.generate,
            **{key: value for key, value in more.items() if value},
        }
