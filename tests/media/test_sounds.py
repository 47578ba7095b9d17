"""What a stranger sends is a sound or one clear line, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import limits
import numpy as np
import pytest

from shardmill.errors import MediaError
from shardmill.media.sounds import open_sound

from . import noises
from .noises import EITHER, RATE, Sent, coded, compressed, tone, wav

soundfile = pytest.importorskip("soundfile")
SENT = [
    sent for kind in (noises.good, noises.good_compressed, noises.refused, noises.of_other_types) for sent in kind()
]


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: sent.name.replace(" ", "-"))
def test_what_a_stranger_sends_is_a_sound_or_a_line(sent: Sent) -> None:
    try:
        samples = open_sound(sent.content, RATE)
        assert samples.dtype == np.float32 and samples.ndim == 1 and np.isfinite(samples).all()
        assert sent.becomes in (len(samples), EITHER)
    except MediaError as error:
        said = str(error)
        assert isinstance(sent.becomes, str) and (sent.becomes == EITHER or sent.becomes in said)
        assert len(said) < 200 and said.isprintable()


def test_there_are_enough_of_them() -> None:
    assert len(SENT) > 90 and len({sent.name for sent in SENT}) == len(SENT)


@pytest.mark.parametrize(("coding", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_a_wav_is_read_as_soundfile_reads_it(coding: int, bits: int) -> None:
    from io import BytesIO

    content = wav(coded(tone(channels=2), coding, bits), coding, 2, bits=bits)
    wanted, rate = soundfile.read(BytesIO(content), always_2d=True)
    assert rate == RATE
    told = open_sound(content, RATE)
    np.testing.assert_array_equal(told, wanted.mean(axis=1).astype(np.float32))
    step = 2.0 ** (1 - bits) if coding == 1 else 0.0  # a mean of two channels is off by a step at most
    rounded = limits.roundings("fp32", 2).value
    np.testing.assert_allclose(told, tone(channels=2).mean(axis=1), rtol=0, atol=step + rounded)


@pytest.mark.parametrize("rate", [8000, 44100, 48000, 22050])
def test_another_rate_gives_the_same_tone(rate: int) -> None:
    """Within 1 %, inside the sound; its ends ring."""
    told = open_sound(wav(coded(tone(rate, rate), 3, 32), 3, rate=rate, bits=32), RATE)
    wanted = tone(RATE)[:, 0]
    assert len(told) == RATE
    assert np.abs(told - wanted)[200:-200].max() < 0.005


def test_without_soundfile_only_wav_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = compressed("FLAC")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(open_sound(wav(coded(tone(), 1, 16)), RATE)) == 1600
    with pytest.raises(MediaError, match="install shardmill with the extra audio for FLAC, Ogg and MP3"):
        open_sound(content, RATE)


PEAK = """
import resource, sys
from pathlib import Path
from shardmill.media.sounds import open_sound

def peak():  # bytes; getrusage of Linux counts what the process was before it became this program
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])

content = Path(sys.argv[1]).read_bytes()
open_sound(Path(sys.argv[2]).read_bytes(), 16000)
before = peak()
open_sound(content, 16000)
print(peak() - before)
"""
FRAMES = 4_000_000


@pytest.mark.thorough(but=["wav", "flac"])
@pytest.mark.parametrize("name", ["wav", "wav of 8 channels", "flac"])
def test_a_sound_takes_bounded_memory(name: str, tmp_path: Path) -> None:
    """As many bytes as a few copies of one channel in single precision, however many channels there are."""
    (tmp_path / "small").write_bytes(compressed("FLAC", rate=44100) if name == "flac" else wav(coded(tone(), 1, 16)))
    if name == "flac":
        content = compressed("FLAC", rate=44100, length=FRAMES)
    else:
        channels = 8 if "8" in name else 1
        content = wav(coded(tone(FRAMES, 44100, channels), 1, 8), rate=44100, channels=channels, bits=8)
    (tmp_path / "large").write_bytes(content)
    script = [sys.executable, "-c", PEAK, tmp_path / "large", tmp_path / "small"]
    ran = subprocess.run(script, capture_output=True, text=True, check=True)
    assert 4 * FRAMES < int(ran.stdout) < 24 * FRAMES + (16 << 20)
