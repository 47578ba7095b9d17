"""Sounds in requests: read from base64, heard by the model's rules, and transcribed as OpenAI's API has it.

Nothing is fetched and no path is opened: a sound is in the request, or it is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardmill.errors import MediaError
from shardmill.files import digest
from shardmill.media.prompt import HeardSound, MediaPrompt, hear_sound
from shardmill.media.sound_rules import SoundRules, read_sound_rules
from shardmill.media.sounds import LIMITS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class SoundReader:
    """What reads the sounds of requests to a build with a tower for them.

    Attributes:
        rules: how a sound becomes windows and text.
        most: sounds in one request.
        build: a digest of the build.
        vocab: the size of the vocabulary.
        tokenizer: the model's tokenizer.
        slots: of the context, which no sound outlasts.
    """

    rules: SoundRules
    most: int
    build: str
    vocab: int
    tokenizer: Tokenizer
    slots: int

    def see(self, sounds: Sequence[bytes]) -> list[HeardSound]:
        """Return sounds as the model hears them.

        Raises:
            MediaError: if there are too many, or one can't be used.
        """
        if len(sounds) > self.most:
            raise MediaError(f"there are {len(sounds)} sounds, at most {self.most} are allowed: send fewer")
        seconds = max(1, min(LIMITS.seconds, int(self.slots / self.rules.rate)))
        limits = replace(LIMITS, seconds=seconds)
        return [hear_sound(content, self.rules, self.build, self.vocab, limits) for content in sounds]

    def prompt(self, sounds: Sequence[HeardSound]) -> MediaPrompt:
        """Return a prompt in which sounds take their places."""
        return MediaPrompt(self.rules, self.tokenizer, sounds)


def sound_reader(manifest: Mapping[str, Any], tokenizer: Tokenizer) -> SoundReader | None:
    """Return what reads sounds for a build; None if the build takes none."""
    audio = dict(manifest.get("audio", {}))
    if "tower" not in manifest or not audio:
        return None
    most, rules = audio.pop("most"), read_sound_rules(audio)
    return SoundReader(rules, most, digest(manifest), manifest["vocab"], tokenizer, manifest["context"])


def sound_bytes(data: str) -> bytes:
    """Return the file in base64.

    Raises:
        MediaError: if it is none.
    """
    if len(data) * 3 // 4 > LIMITS.bytes + 3:
        raise MediaError(f"the sound has more than {LIMITS.bytes} bytes: cut or compress it")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("input_audio.data holds no base64: no address is fetched, send the file itself") from error
