"""A conversation with pictures or sounds as tokens: each placeholder of the chat template becomes one's rows.

What looks like a placeholder in somebody's text stays text: it is hidden from the template, and from the tokenizer's
list of special tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmill.errors import MediaError
from shardmill.media.image_rules import ImageRules
from shardmill.media.layout import Layout, placeholder_text
from shardmill.media.numbers import row_numbers
from shardmill.media.pictures import LIMITS, ImageLimits, open_picture
from shardmill.media.pixels import View, views
from shardmill.media.sound_rules import SoundRules, Window, windows
from shardmill.media.sounds import LIMITS as SOUND_LIMITS
from shardmill.media.sounds import SoundLimits, open_sound

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class Row:
    """The rows of a view: what the tower makes them from, and their numbers."""

    view: View | Window
    numbers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Shown:
    shown: tuple[Row, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of all rows, in their order in a prompt."""
        return tuple(number for row in self.shown for number in row.numbers)


@dataclass(frozen=True, eq=False)
class SeenPicture(_Shown):
    """A picture as a model sees it.

    Attributes:
        shown: the picture's views, each with the numbers of its rows.
        size: (width, height) as the picture was sent, upright.
        layout: what became of the picture.
    """

    size: tuple[int, int]
    layout: Layout

    kind = ("image", "images")  # as an answer's usage names one, and several

    def placeholder(self, rules: Any) -> str:
        """Return the text that takes its place in a prompt."""
        return placeholder_text(rules, self.layout)

    def facts(self) -> dict[str, Any]:
        """Return what an answer says of it: its size, what it became, and the tokens that it takes."""
        width, height = self.layout.resized[-1]
        return {"size": [*self.size], "resized": [width, height], "tokens": len(self.numbers)}


@dataclass(frozen=True, eq=False)
class HeardSound(_Shown):
    """A sound as a model hears it.

    Attributes:
        shown: the sound's windows, each with the numbers of its rows.
        seconds: the sound's length.
    """

    seconds: float

    kind = ("audio", "sounds")

    def placeholder(self, rules: Any) -> str:
        """Return the text that takes its place in a prompt."""
        return str(rules.text.row) * len(self.numbers)

    def facts(self) -> dict[str, Any]:
        """Return what an answer says of it: its length, and the tokens that it takes."""
        return {"seconds": round(self.seconds, 2), "tokens": len(self.numbers)}


Seen = SeenPicture | HeardSound


def hear_sound(
    content: bytes, rules: SoundRules, build: str, vocab: int, limits: SoundLimits = SOUND_LIMITS
) -> HeardSound:
    """Decode a sound, and turn it into windows for a model; arguments and errors are those of `see_picture`."""
    samples = open_sound(content, rules.mel.rate, limits)
    heard = windows(rules, samples)
    shown = [Row(view, row_numbers(view, build, vocab, rules.rows_of(view.grid[1]))) for view in heard]
    return HeardSound(tuple(shown), len(samples) / rules.mel.rate)


def see_picture(content: bytes, rules: ImageRules, build: str, vocab: int, limits: ImageLimits = LIMITS) -> SeenPicture:
    """Decode a picture, and lay it out for a model.

    Args:
        content: the bytes of the file.
        rules: the model's rules.
        build: what tells the model's programs from others.
        vocab: the size of the vocabulary.
        limits: what is refused.

    Raises:
        MediaError: one line that says what is wrong with it.
    """
    picture = open_picture(content, limits)
    layout, seen = views(rules, picture)
    shown = [Row(view, row_numbers(view, build, vocab, view.grid[0] * view.grid[1] // rules.merge**2)) for view in seen]
    return SeenPicture(tuple(shown), picture.size, layout)


class MediaPrompt:
    """A conversation on its way through a chat template.

    Args:
        rules: the model's rules.
        tokenizer: the model's tokenizer.
        pictures: the pictures or the sounds, in the order of their places in the conversation.
    """

    def __init__(self, rules: ImageRules | SoundRules, tokenizer: Tokenizer, pictures: Sequence[Seen]) -> None:
        self._rules, self._tokenizer, self._pictures = rules, tokenizer, pictures
        self._texts = [picture.placeholder(rules) for picture in pictures]
        added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._added = set(added.values())
        row = tokenizer.token_to_id(rules.text.row)
        self._row = -1 if row is None else row
        self._mark = "\ue000" + secrets.token_hex(8)  # of a place; nobody can have written it
        special = {token for token in added if any(token in text for text in self._texts)}
        hidden = sorted({rules.text.mark, rules.text.row, *special}, key=len, reverse=True)
        self._hidden = dict(zip(hidden, (f"{self._mark}{place:04d}" for place in range(len(hidden))), strict=True))
        self._shown = {mark: text for text, mark in self._hidden.items()}
        self._special = re.compile("|".join(map(re.escape, hidden)))

    def hide(self, value: Any) -> Any:
        """Return messages, tools or variables, in which no text looks like a placeholder."""
        if isinstance(value, str):
            return self._special.sub(lambda match: self._hidden[match[0]], value)
        if isinstance(value, Mapping):
            return {key: self.hide(one) for key, one in value.items()}
        return [self.hide(one) for one in value] if isinstance(value, list | tuple) else value

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered conversation, with the numbers of the pictures' rows.

        Raises:
            MediaError: if the template shows another number of pictures, or the tokenizer lacks the token of a row.
        """
        pieces = re.split(f"({re.escape(self._rules.text.mark)}|{self._mark}[0-9]{{4}})", text)
        places = pieces.count(self._rules.text.mark)
        if places != len(self._pictures):
            kind = "sounds" if isinstance(self._rules, SoundRules) else "pictures"
            raise MediaError(f"the chat template shows {places} of {len(self._pictures)} {kind}: send fewer")
        whole, plain, left = "", list[tuple[int, int]](), iter(self._texts)
        for piece in pieces:
            if piece in self._shown:
                plain.append((len(whole), len(whole) + len(self._shown[piece])))
                whole += self._shown[piece]
            else:
                whole += next(left) if piece == self._rules.text.mark else piece
        return self._numbered(whole, plain)

    def _numbered(self, whole: str, plain: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the tokens of a text whose pieces `plain` hold no special tokens, the rows' with their numbers."""
        numbers = [number for picture in self._pictures for number in picture.numbers]
        coded = self._tokenizer.encode(whole, add_special_tokens=False)
        tokens, left = list[int](), iter(numbers)
        spans = iter([*plain, (len(whole), len(whole))])
        start, end = next(spans)
        for token, (first, last) in zip(coded.ids, coded.offsets, strict=True):
            while end <= first < len(whole):
                start, end = next(spans)
            if token in self._added and last > start and first < end:
                for part in (whole[first : first + 1], whole[first + 1 : last]):
                    tokens += self._tokenizer.encode(part, add_special_tokens=False).ids
            else:
                tokens.append(next(left, -1) if token == self._row else token)
        if tokens.count(-1) or next(left, None) is not None:
            raise MediaError(f"the tokenizer gives {coded.ids.count(self._row)} rows for {len(numbers)}: build again")
        return tuple(tokens)
