"""Pictures in requests: read from data URIs, laid out for the model, and held by the engine while answers need them.

Nothing is fetched and no path is opened: a picture is in the request, or it is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardmill.errors import MediaError
from shardmill.files import digest, read_bytes
from shardmill.media.image_rules import ImageRules, read_image_rules
from shardmill.media.pictures import LIMITS
from shardmill.media.prompt import HeardSound, MediaPrompt, Row, SeenPicture, see_picture

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardmill.media.pixels import Columns

_DATA = re.compile(r"[dD][aA][tT][aA]:[a-zA-Z0-9.+/-]*(;[a-zA-Z0-9.+-]+=[^;,]*)*;[bB][aA][sS][eE]64,")
_BLANK = re.compile(r"\s+")
Taken = TypeVar("Taken", SeenPicture, HeardSound)
IDLE = 16_384  # rows that no answer uses and that are held for later turns: 256 MB of rows of 4,096 numbers


@dataclass(frozen=True)
class PictureReader:
    """What reads the pictures of requests to a build with a tower for images.

    Attributes:
        rules: how a picture becomes views and text.
        most: pictures in one request.
        build: a digest of the build.
        vocab: the size of the vocabulary.
        tokenizer: the model's tokenizer.
    """

    rules: ImageRules
    most: int
    build: str
    vocab: int
    tokenizer: Tokenizer

    def see(self, pictures: Sequence[bytes]) -> list[SeenPicture]:
        """Return pictures as the model sees them.

        Raises:
            MediaError: if there are too many, or one can't be used.
        """
        if len(pictures) > self.most:
            raise MediaError(f"there are {len(pictures)} pictures, at most {self.most} are allowed: send fewer")
        return [see_picture(content, self.rules, self.build, self.vocab) for content in pictures]

    def prompt(self, pictures: Sequence[SeenPicture]) -> MediaPrompt:
        """Return a prompt in which pictures take their places."""
        return MediaPrompt(self.rules, self.tokenizer, pictures)


def take_file(see: Callable[[Sequence[bytes]], list[Taken]], file: Path) -> Taken:
    """Return the picture or sound in a file as the model takes it; `see` is that of a PictureReader or SoundReader.

    Raises:
        MediaError: if the file can't be read, or can't be used.
    """
    try:
        (taken,) = see([read_bytes(file)])
    except OSError as error:
        raise MediaError(f"{file}: can't be read: {error.strerror}") from error
    except MediaError as error:
        raise MediaError(f"{file}: {error}") from error
    return taken


def picture_reader(manifest: Mapping[str, Any], tokenizer: Tokenizer) -> PictureReader | None:
    """Return what reads pictures for a build; None if the build takes none."""
    images = dict(manifest.get("images", {}))
    if "tower" not in manifest or not images:
        return None
    most = images.pop("most")
    return PictureReader(read_image_rules(images), most, digest(manifest), manifest["vocab"], tokenizer)


def picture_bytes(uri: str) -> bytes:
    """Return the file in a data URI.

    Raises:
        MediaError: if it is another address, which is not fetched, or damaged.
    """
    head = _DATA.match(uri[:1024])
    if head is None:
        raise MediaError(
            "an image's url must be data:image/png;base64,...: no address is fetched, send the file itself"
        )
    if (len(uri) - head.end()) * 3 // 4 > LIMITS.bytes + 3:
        raise MediaError(f"the picture has more than {LIMITS.bytes} bytes: shrink it")
    try:
        return base64.b64decode(_BLANK.sub("", uri[head.end() :]), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("the image's url holds no base64") from error


class Shower(Protocol):
    """An engine with a tower."""

    def show(self, numbers: Sequence[int], columns: Columns, grid: tuple[int, int]) -> None:
        """Compute the rows of a view, and hold them by their numbers."""

    def release(self, numbers: Sequence[int]) -> None:
        """Give up rows."""


class Gallery:
    """The pictures and sounds whose rows an engine holds: those that answers use, and the last others, for later turns.

    Args:
        engine: the engine, which alone has the rows.
        idle: rows that may be held without an answer that uses them.
    """

    def __init__(self, engine: Shower, idle: int = IDLE) -> None:
        self._engine, self._most = engine, idle
        self._used: dict[tuple[int, ...], int] = {}  # numbers of a view -> answers that use it
        self._idle: OrderedDict[tuple[int, ...], None] = OrderedDict()  # the least recently used first

    def take(self, rows: Sequence[Row]) -> None:
        """Let the engine hold rows until `give_back`; raises what the tower raises, and then holds none of them."""
        taken = list[Row]()
        try:
            for row in rows:
                if row.numbers not in self._used and row.numbers not in self._idle:
                    self._engine.show(row.numbers, row.view.columns, row.view.grid)
                self._idle.pop(row.numbers, None)
                self._used[row.numbers] = self._used.get(row.numbers, 0) + 1
                taken.append(row)
        except BaseException:
            self.give_back(taken)
            raise

    def give_back(self, rows: Sequence[Row]) -> None:
        """Say that an answer needs its rows no longer."""
        for row in rows:
            self._used[row.numbers] -= 1
            if not self._used[row.numbers]:
                del self._used[row.numbers]
                self._idle[row.numbers] = None
        while sum(map(len, self._idle)) > self._most:
            numbers, _ = self._idle.popitem(last=False)
            self._engine.release(numbers)
