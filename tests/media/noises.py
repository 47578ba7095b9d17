"""Sounds that strangers send, each with what becomes of it: seconds, or what the refusal says, or either."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from io import BytesIO
from typing import NamedTuple

import numpy as np

EITHER = "either"
RATE, LENGTH = 16000, 1600
DAMAGED = "the sound is damaged: "
UNKNOWN = "the sound is in no known format (WAV, FLAC, Ogg, MP3), or its header is damaged"


class Sent(NamedTuple):
    name: str
    content: bytes
    becomes: int | str  # samples at RATE


def tone(length: int = LENGTH, rate: int = RATE, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(length) / rate)
    return np.stack([wave / (1 + k) for k in range(channels)], axis=1)


def wav(
    data: bytes,
    coding: int = 1,
    channels: int = 1,
    rate: int = RATE,
    bits: int = 16,
    length: int | None = None,
    before: bytes = b"",
    more: bytes = b"",
) -> bytes:
    each = channels * bits // 8
    form = (
        struct.pack("<HHIIHH", coding, channels, rate & 0xFFFFFFFF, rate * each & 0xFFFFFFFF, each & 0xFFFF, bits)
        + more
    )
    body = before + b"fmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data) if length is None else length) + data
    return b"RIFF" + struct.pack("<I", len(body) + 4 & 0xFFFFFFFF) + b"WAVE" + body


def coded(samples: np.ndarray, coding: int, bits: int) -> bytes:
    """Samples as a coding of WAV has them."""
    if coding == 3:
        return samples.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    wide = np.round(samples * ((1 << bits - 1) - 1)).astype("<i8")
    return np.ascontiguousarray(wide.view(np.uint8).reshape(*wide.shape, 8)[..., : bits // 8]).tobytes()


def compressed(form: str, subtype: str = "", channels: int = 1, rate: int = RATE, length: int = LENGTH) -> bytes:
    import soundfile

    file = BytesIO()
    soundfile.write(file, tone(length, rate, channels), rate, format=form, subtype=subtype or None)
    return file.getvalue()


def good() -> Iterator[Sent]:
    for coding, bits in [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)]:
        for channels in (1, 2):
            content = wav(coded(tone(channels=channels), coding, bits), coding, channels, bits=bits)
            yield Sent(f"wav {coding} of {bits} bits, {channels} channels", content, LENGTH)
    guid = struct.pack("<HHIH14s", 22, 16, 4, 1, bytes.fromhex("000000001000800000aa00389b71"))
    yield Sent("wav extensible", wav(coded(tone(), 1, 16), 0xFFFE, more=guid), LENGTH)
    yield Sent("wav with a list before", wav(coded(tone(), 1, 16), before=b"LIST\x05\0\0\0abcde\0"), LENGTH)
    for length in (0xFFFFFFFF, 0x7FFFFFFF):
        yield Sent(f"wav from a pipe, {length:x}", wav(coded(tone(), 1, 16), length=length), LENGTH)
    for rate in (8000, 11025, 22050, 44100, 48000, 96000, 192000):
        content = wav(coded(tone(rate // 10, rate), 1, 16), rate=rate)
        yield Sent(f"wav of {rate} Hz", content, -(-(rate // 10) * RATE // rate))
    yield Sent("wav of 8 channels", wav(coded(tone(channels=8), 1, 16), channels=8), LENGTH)


def good_compressed() -> Iterator[Sent]:
    yield Sent("flac", compressed("FLAC"), LENGTH)
    yield Sent("flac of two channels", compressed("FLAC", channels=2, rate=44100, length=4410), LENGTH)
    yield Sent("ogg vorbis", compressed("OGG", "VORBIS"), LENGTH)
    yield Sent("ogg opus", compressed("OGG", "OPUS"), LENGTH)
    yield Sent("mp3", compressed("MP3"), EITHER)
    for form in ("FLAC", "OGG", "MP3"):
        content = compressed(form)
        for percent in (1, 10, 50, 90):
            yield Sent(f"{form}, {percent} %", content[: max(1, len(content) * percent // 100)], EITHER)
        drawn = random.Random(0)
        for k in range(5):
            noisy = bytearray(content)
            for _ in range(8):
                noisy[drawn.randrange(len(noisy))] = drawn.randrange(256)
            yield Sent(f"{form} with noise {k}", bytes(noisy), EITHER)
    flac = bytearray(compressed("FLAC"))
    flac[21] |= 15  # the number of samples has 36 bits
    flac[22:26] = b"\xff\xff\xff\xff"
    yield Sent("flac that says 19 hours", bytes(flac), "at most 600 s are allowed")
    for rate in (1, 3999, 300_000):
        yield Sent(f"flac of {rate} Hz", compressed("FLAC", rate=rate), "4000 to 192000 are allowed")


def refused() -> Iterator[Sent]:
    data = coded(tone(), 1, 16)
    for bad in (np.nan, np.inf, -np.inf):
        samples = tone()
        samples[700] = bad
        for bits in (32, 64):
            yield Sent(f"{bad} in {bits} bits", wav(coded(samples, 3, bits), 3, bits=bits), "no finite numbers")
    huge = np.full((LENGTH, 2), 1e308)
    yield Sent("numbers beyond single precision", wav(coded(huge, 3, 64), 3, 2, bits=64), "no finite numbers")
    yield Sent("no samples", wav(b""), "the sound is empty")
    yield Sent("half a sample", wav(b"\1"), "the sound is empty")
    yield Sent("100 channels", wav(data * 100, channels=100), "100 channels, 1 to 8 are allowed")
    yield Sent("65535 channels", wav(data, channels=65535, bits=8), "65535 channels")
    yield Sent("no channels", wav(data, channels=0), "0 channels")
    for rate in (0, 1, 3999, 192_001, 0xFFFFFFFF):
        yield Sent(f"{rate} Hz", wav(data, rate=rate), "4000 to 192000 are allowed")
    yield Sent("cut off", wav(data)[:-1000], "cut off: its samples end after 2200 of 3200 bytes")
    yield Sent("a length of 2 GB", wav(data, length=0x7FFFEFFF), "cut off")
    yield Sent("11 minutes", wav(bytes(660 * 4000), rate=4000, bits=8), "the sound lasts 660 s, at most 600 s are")
    eight = wav(bytes(8 * 9_000_000), rate=16000, channels=8, bits=8)
    yield Sent("too many samples", eight, "the sound has 72000044 bytes")
    long = wav(bytes(8 * 6_000_000 + 8), rate=192_000, channels=8, bits=8)
    yield Sent("48 million samples", long, EITHER)
    for coding, bits in [(6, 8), (7, 8), (2, 4), (85, 0), (1, 12), (1, 64), (3, 16), (1, 0), (0, 16)]:
        yield Sent(
            f"coding {coding} of {bits} bits", wav(data, coding, bits=bits), f"WAV of coding {coding} with {bits}"
        )
    yield Sent("extensible without its kind", wav(data, 0xFFFE), "coding 65534")
    yield Sent("no format", b"RIFF\x24\0\0\0WAVEdata\4\0\0\0abcd", DAMAGED)
    yield Sent("a short format", b"RIFF\x24\0\0\0WAVEfmt \2\0\0\0\1\0data\4\0\0\0abcd", DAMAGED)
    yield Sent("no data", wav(data)[:36], DAMAGED)
    yield Sent("a chunk of 4 GB before", wav(data, before=b"LIST\xff\xff\xff\xff"), DAMAGED)
    yield Sent("riff alone", b"RIFF\x24\0\0\0WAVE", DAMAGED)
    yield Sent("frames of another size", wav(data)[:32] + b"\7\0" + wav(data)[34:], "WAV of coding 1 with 16")
    yield Sent("50 MB and a byte", bytes((50 << 20) + 1), "at most 52428800 are allowed")


def of_other_types() -> Iterator[Sent]:
    texts = {
        "empty": b"",
        "text": b"hello world " * 100,
        "a path": b"/etc/passwd",
        "a url": b"https://example.com/x.wav",
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(60),
        "zeros": bytes(1000),
        "mp4": b"\0\0\0\x18ftypM4A " + bytes(60),
        "signature of flac alone": b"fLaC",
        "signature of ogg alone": b"OggS",
        "riff of another kind": b"RIFF\x24\0\0\0AVI " + bytes(60),
    }
    yield from (Sent(name, content, "the sound is ") for name, content in texts.items())
