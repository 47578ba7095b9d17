"""A sound as frames of log-mel numbers, by rules that are data of a build.

All is computed in double precision and rounded once, but where a model's own extractor rounds to single precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmill.errors import MediaError

Samples: TypeAlias = NDArray[np.float32]  # [n], one channel
Frames: TypeAlias = NDArray[np.float32]
BLOCK = 1024  # frames that are computed at a time: a spectrum takes 16 bytes a number


@dataclass(frozen=True)
class MelRules:
    """How samples become frames.

    Attributes:
        rate: samples a second.
        bins: mel bins of a frame.
        window: samples of the window, which is Hann's.
        fft: samples of the transform, at least `window`.
        hop: samples between frames.
        scale: where the bins lie: "slaney", whose bins have the same area, or "htk", whose bins have the same height.
        highest: the highest frequency of a bin, in Hz.
        lead: what precedes the first frame: "reflect", the beginning mirrored, and the end likewise; or "zeros".
        power: 2 for the spectrum's power, 1 for its magnitude.
        log: "decades": (log10 + 4) / 4, at least eight decades below the top; or "natural", of a number plus the floor.
        floor: what numbers are before the logarithm at least, or what is added to them.
        top: log10 of the loudest number of all sounds; None: of this sound.
        least: samples; a shorter sound is followed by silence.
        last: whether the last frame, which "reflect" adds, counts.
        stack: frames that become one.
        single: whether spectra are in single precision. With a low `floor`, their roundings show.
    """

    rate: int
    bins: int
    window: int
    fft: int
    hop: int
    scale: Literal["slaney", "htk"]
    highest: float
    lead: Literal["reflect", "zeros"]
    power: int
    log: Literal["decades", "natural"]
    floor: float
    top: float | None = None
    least: int = 0
    last: bool = False
    stack: int = 1
    single: bool = False

    def written(self) -> dict[str, Any]:
        """Return the rules as JSON; `read_mel_rules` is the way back."""
        return asdict(self)


def read_mel_rules(content: Mapping[str, Any]) -> MelRules:
    """Return the rules that `MelRules.written` gave.

    Raises:
        TypeError: if it is something else.
    """
    return MelRules(**content)


def log_mel(rules: MelRules, samples: Samples) -> Frames:
    """Return the frames of a sound, [stack * bins, frames].

    Args:
        rules: the rules.
        samples: the sound at the rules' rate. A model that is fed with windows of a fixed length needs the silence
            after a short sound here already: the last frames before it have some of it.

    Raises:
        MediaError: if the sound is shorter than a frame.
    """
    pieces = _pieces(rules, samples)
    window = np.zeros(rules.fft, pieces.dtype)
    start = (rules.fft - rules.window) // 2 if rules.lead == "reflect" else 0
    window[start : start + rules.window] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(rules.window) / rules.window)
    filters = mel_filters(rules)
    blocks = [
        np.abs(np.fft.rfft(pieces[at : at + BLOCK] * window[: pieces.shape[1]], rules.fft)) ** rules.power @ filters
        for at in range(0, len(pieces), BLOCK)
    ]
    logs = _logarithm(rules, np.concatenate(blocks))
    logs = logs[: len(logs) // rules.stack * rules.stack]
    return logs.reshape(-1, rules.stack * rules.bins).T.astype(np.float32)


def _pieces(rules: MelRules, samples: Samples) -> NDArray[np.floating]:
    """Return the samples of each frame, [frames, fft or window], as a view.

    Raises:
        MediaError: if there is none.
    """
    sound = np.pad(samples.astype(np.float32 if rules.single else np.float64), (0, max(0, rules.least - len(samples))))
    if rules.lead == "zeros":  # a frame needs one more sample than its window, since some models emphasise differences
        sound = np.pad(sound, (rules.window // 2, 0))
        length, more = rules.window, 1
    elif len(sound) > rules.fft // 2:  # a mirror needs something to mirror
        sound = np.pad(sound, rules.fft // 2, mode="reflect")
        length, more = rules.fft, 0
    else:
        sound, length, more = sound[:0], rules.fft, 0
    count = (len(sound) - length - more) // rules.hop + 1
    count -= rules.lead == "reflect" and not rules.last
    if count < rules.stack:
        raise MediaError("the sound is shorter than a frame: send a longer one")
    return np.lib.stride_tricks.sliding_window_view(sound, length)[:: rules.hop][:count]


def _logarithm(rules: MelRules, mel: NDArray[np.float64]) -> NDArray[np.float64]:
    if rules.log == "natural":
        natural: NDArray[np.float64] = np.log(mel + rules.floor)
        return natural
    logs = np.log10(np.maximum(mel, rules.floor))
    top = float(logs.max()) if rules.top is None else rules.top
    decades: NDArray[np.float64] = (np.maximum(logs, top - 8) + 4) / 4
    return decades


@lru_cache(maxsize=4)
def mel_filters(rules: MelRules) -> NDArray[np.float64]:
    """Return the share of each frequency in each bin, [fft / 2 + 1, bins]: triangles that overlap by halves."""
    hertz = np.linspace(0, rules.rate / 2, rules.fft // 2 + 1)
    top = float(_mel(rules.scale, np.array(rules.highest)))
    edges = _hertz(rules.scale, np.linspace(0, top, rules.bins + 2))
    slopes = edges[:, None] - hertz
    widths = np.diff(edges)[:, None]
    shares: NDArray[np.float64] = np.maximum(0, np.minimum(-slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]))
    if rules.scale == "slaney":
        shares *= (2 / (edges[2:] - edges[:-2]))[:, None]
    return shares.T


# Slaney's scale is linear up to 1 kHz, which is mel 15, and logarithmic above: 27 mels for a factor of 6.4.
def _mel(scale: str, hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    if scale == "htk":
        return 2595 * np.log10(1 + hertz / 700)
    return np.where(hertz < 1000, 3 * hertz / 200, 15 + 27 * np.log(np.maximum(hertz, 1) / 1000) / np.log(6.4))


def _hertz(scale: str, mel: NDArray[np.float64]) -> NDArray[np.float64]:
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) / 27 * (mel - 15)))
