"""The rules by which a sound becomes windows of frames and a piece of the prompt. They are data of a build.

A model's family decides the numbers; nothing here knows a family. `media/extractors.py` reads a checkpoint's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardmill.media.image_rules import Placeholder
from shardmill.media.mel import Frames, MelRules, Samples, log_mel, read_mel_rules


@dataclass(frozen=True)
class Transcription:
    """How a transcription is asked for and read.

    Attributes:
        begin: what an answer begins with, for a named {language}.
        marker: what precedes the text in an answer that names the language itself.
        languages: the model's name of each language, by its code.
    """

    begin: str
    marker: str
    languages: Mapping[str, str]

    def text(self, answer: str) -> str:
        """Return the text of an answer."""
        return answer.partition(self.marker)[2].strip() if self.marker in answer else answer.strip()


@dataclass(frozen=True)
class SoundRules:
    """How a sound becomes windows, and a window becomes rows.

    Attributes:
        mel: how samples become frames.
        window: frames that the tower sees at once; the last window of a sound may be shorter.
        chunk: frames that the tower's convolutions see.
        rows: that a whole chunk becomes; a shorter one becomes as many as steps of two leave, three times.
        text: what takes a sound's place in a prompt.
        transcription: how a transcription is asked for; None: as any other answer.
    """

    mel: MelRules
    window: int
    chunk: int
    rows: int
    text: Placeholder
    transcription: Transcription | None = None

    @property
    def rate(self) -> float:
        """Return the rows of a second."""
        return self.mel.rate / self.mel.hop / self.chunk * self.rows

    def rows_of(self, frames: int) -> int:
        """Return the rows of a window."""
        whole, rest = divmod(frames, self.chunk)
        for _ in range(3):
            rest = (rest + 1) // 2
        return whole * self.rows + rest

    def written(self) -> dict[str, Any]:
        """Return the rules as JSON; `read_sound_rules` is the way back."""
        text = {key: value for key, value in vars(self.text).items() if value}
        content = asdict(self) | {"mel": self.mel.written(), "text": text}
        return {key: value for key, value in content.items() if value is not None}


def read_sound_rules(content: Mapping[str, Any]) -> SoundRules:
    """Return the rules that `SoundRules.written` gave.

    Raises:
        KeyError, TypeError: if it is something else.
    """
    more: dict[str, Any] = {"mel": read_mel_rules(content["mel"]), "text": Placeholder(**content["text"])}
    if asked := content.get("transcription"):
        more["transcription"] = Transcription(**asked)
    return SoundRules(**{**content, **more})


@dataclass(frozen=True, eq=False)
class Window:
    """What the tower hears at once: frames as columns, [bins, n]."""

    columns: Frames

    @property
    def grid(self) -> tuple[int, int]:
        """Return one row, and a column for each frame."""
        return 1, self.columns.shape[1]


def windows(rules: SoundRules, samples: Samples) -> tuple[Window, ...]:
    """Return a sound's windows in order.

    Raises:
        MediaError: if the sound is shorter than a frame.
    """
    frames: Frames = log_mel(rules.mel, samples)
    cuts = range(0, frames.shape[1], rules.window)
    return tuple(Window(frames[:, start : start + rules.window].copy()) for start in cuts)
