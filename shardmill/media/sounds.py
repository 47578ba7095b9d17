"""A sound that a stranger sends, as samples of one channel at the rate of a model.

WAV is read here; for everything else the extra `audio` brings soundfile. Nothing is fetched and no path is opened. What
a header says is judged before anything is decoded, and what comes out is counted, since headers may be wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.errors import MediaError
from shardmill.media.mel import Samples
from shardmill.printable import printable

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # codings of WAV
UNTOLD = 0x7FFFF000  # a recorder that can't go back writes such a length, or more
BLOCK = 1 << 16  # samples that are decoded at a time
# What each coding of WAV has for samples: numpy's type, the level of silence, and the loudest level.
LEVELS = {
    (PCM, 8): ("u1", 128, 128),
    (PCM, 16): ("<i2", 0, 1 << 15),
    (PCM, 32): ("<i4", 0, 1 << 31),
    (FLOAT, 32): ("<f4", 0, 1),
    (FLOAT, 64): ("<f8", 0, 1),
}


@dataclass(frozen=True)
class SoundLimits:
    """Limits on a sound.

    Attributes:
        bytes: the encoded sound's size.
        seconds: its length.
        channels: they are averaged.
        rates: the lowest and the highest number of samples a second.
        samples: of all channels together.
    """

    bytes: int = 50 << 20
    seconds: int = 600
    channels: int = 8
    rates: tuple[int, int] = (4_000, 192_000)
    samples: int = 64_000_000


LIMITS = SoundLimits()


def open_sound(content: bytes, rate: int, limits: SoundLimits = LIMITS) -> Samples:
    """Decode a sound.

    Args:
        content: the bytes of a WAV file, or with soundfile of a FLAC, Ogg or MP3 file.
        rate: samples a second of the result.
        limits: what is refused.

    Returns:
        The mean of the channels, [n].

    Raises:
        MediaError: one line that says what is wrong with it.
    """
    if len(content) > limits.bytes:
        raise MediaError(f"the sound has {len(content)} bytes, at most {limits.bytes} are allowed: cut or compress it")
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        told, blocks = _wav(content, limits)
    else:
        told, blocks = _other(content, limits)
    samples = _joined(blocks, told, limits)
    if not len(samples):
        raise MediaError("the sound is empty")
    if not np.isfinite(samples).all():
        raise MediaError("the sound holds samples that are no finite numbers")
    if told == rate:
        return samples
    from scipy.signal import resample_poly

    shared = gcd(told, rate)
    resampled: Samples = resample_poly(samples, rate // shared, told // shared).astype(np.float32)
    return resampled


def _judge(rate: int, channels: int, frames: int, limits: SoundLimits) -> None:
    """Raise MediaError for a sound that breaks a limit, given what its header says."""
    least, most = limits.rates
    if not least <= rate <= most:
        raise MediaError(f"the sound has {rate} samples a second, {least} to {most} are allowed")
    if not 1 <= channels <= limits.channels:
        raise MediaError(f"the sound has {channels} channels, 1 to {limits.channels} are allowed")
    if frames > limits.seconds * rate or frames * channels > limits.samples:
        seconds = min(limits.seconds, limits.samples // channels // rate)
        raise MediaError(f"the sound lasts {frames / rate:.0f} s, at most {seconds} s are allowed: cut it")


def _joined(blocks: Iterable[NDArray[Any]], rate: int, limits: SoundLimits) -> Samples:
    """Return the mean of the channels of blocks [n, channels], which are counted."""
    pieces, frames = list[Samples](), 0
    for block in blocks:
        frames += len(block)
        _judge(rate, block.shape[1], frames, limits)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused later
            pieces.append(block.mean(axis=1, dtype=np.float64).astype(np.float32))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def _wav(content: bytes, limits: SoundLimits) -> tuple[int, Iterator[NDArray[Any]]]:
    """Return the rate of a WAV file, and its blocks.

    Raises:
        MediaError: if it breaks a limit, ends too early, or has a coding that is not read here.
    """
    form, place, length = b"", 12, 0
    while True:
        kind, length = content[place : place + 4], int.from_bytes(content[place + 4 : place + 8], "little")
        if len(content) < place + 8:
            raise MediaError("the sound is damaged: a WAV file without samples")
        place += 8
        if kind == b"data":
            break
        if kind == b"fmt ":
            form = content[place : place + min(length, 40)]
        place += length + length % 2
    if len(form) < 16:
        raise MediaError("the sound is damaged: a WAV file that does not say its coding before its samples")
    coding, channels, rate, _, each, bits = struct.unpack("<HHIIHH", form[:16])
    if coding == EXTENSIBLE and len(form) >= 26:
        coding = int.from_bytes(form[24:26], "little")
    size = bits // 8
    if ((coding, bits) not in LEVELS and (coding, bits) != (PCM, 24)) or each != channels * size:
        raise MediaError(f"the sound is WAV of coding {coding} with {bits} bits: send PCM or floats, or FLAC")
    present = len(content) - place
    if length >= UNTOLD:
        length = present
    if length > present:
        raise MediaError(f"the sound is cut off: its samples end after {present} of {length} bytes")
    _judge(rate, channels, length // max(1, each), limits)
    return rate, _levels(memoryview(content)[place : place + length // each * each], coding, bits, channels)


def _levels(data: memoryview, coding: int, bits: int, channels: int) -> Iterator[NDArray[Any]]:
    """Yield blocks of samples [n, channels], whose loudest level is 1."""
    step = BLOCK * channels * bits // 8
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        if bits == 24:  # a lowest byte of zero makes 32 bits of them
            wide = np.zeros((len(piece) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(piece, np.uint8).reshape(-1, 3)
            levels, silence, loudest = wide.view("<i4").ravel(), 0, 1 << 31
        else:
            kind, silence, loudest = LEVELS[coding, bits]
            levels = np.frombuffer(piece, kind)
        yield ((levels.astype(np.float64) - silence) / loudest).reshape(-1, channels)


def _other(content: bytes, limits: SoundLimits) -> tuple[int, Iterator[NDArray[Any]]]:
    """Return the rate of a file that soundfile reads, and its blocks.

    Raises:
        MediaError: if soundfile is missing or does not read it, or it breaks a limit.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library does not load on this system
        more = "install shardmill with the extra audio for FLAC, Ogg and MP3"
        raise MediaError(f"the sound is no WAV file, which is all that is read here: {more}") from error
    try:
        file = soundfile.SoundFile(BytesIO(content))
    except Exception as error:  # decoders may raise any exception
        raise MediaError("the sound is in no known format (WAV, FLAC, Ogg, MP3), or its header is damaged") from error
    _judge(file.samplerate, file.channels, file.frames, limits)
    return file.samplerate, _decoded(file)


def _decoded(file: Any) -> Iterator[NDArray[Any]]:
    """Yield blocks of samples [n, channels] of a file that soundfile has opened."""
    try:
        with file:
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                yield block
    except Exception as error:  # decoders may raise any exception
        said = printable(str(error).partition("\n")[0])[:100] or type(error).__name__
        raise MediaError(f"the sound is damaged: {said}") from error
