"""Frames of log-mel numbers are those of transformers' feature extractors.

transformers computes Whisper's frames in numpy or in torch. In numpy it computes in double precision, but its spectra
and its result are in single precision: three roundings, since a power has twice the error of its spectrum. torch's
transform is in single precision: a number of a transform in nine stages (log2 of 400) is off by half the root of nine
units of the loudest. A number counts if its power is at least 1e-8 of the loudest, so its magnitude is at least 1e-4 of
the loudest. Its power has twice that error, the logarithm divides by ln 10, the rule by 4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest

from shardmill.errors import CheckpointError, MediaError
from shardmill.media.extractors import checkpoint_mel_rules
from shardmill.media.mel import BLOCK, MelRules, log_mel, mel_filters, read_mel_rules

QUIET = 1e-4  # of the loudest magnitude
NUMPY = limits.roundings("fp32", 3)
SPECTRUM = limits.sums("fp32", 9).value / 2  # of the loudest
# Logarithms of spectra in fp32 differ by 1.5e-3 at most, by derivation; docs/serving.md promises 2e-4.
TORCH = limits.Limit(min(2e-4, 2 * SPECTRUM / QUIET / math.log(10) / 4), "logarithms of spectra in fp32")
RATE = 16000
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "whisper": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80},
    "whisper-large": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128},
    "qwen3-asr": {"feature_extractor_type": "Qwen3ASRFeatureExtractor"},
    "gemma4": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    "granite": {"feature_extractor_type": "GraniteSpeechFeatureExtractor"},
}


def sound(name: str, length: int) -> np.ndarray:
    """A sweep with noise; noise; silence but for a click; or a tone."""
    rng = np.random.default_rng(length)
    if name == "sweep":
        swept = 0.3 * np.sin(2 * np.pi * np.cumsum(np.linspace(100, 4000, length)) / RATE)
        return (swept + 0.02 * rng.standard_normal(length)).astype(np.float32)
    if name == "noise":
        return (0.1 * rng.standard_normal(length)).astype(np.float32)
    if name == "tone":
        return np.sin(2 * np.pi * 440 * np.arange(length) / RATE).astype(np.float32)
    click = np.zeros(length, np.float32)
    click[length // 2] = 0.5
    return click


SOUNDS = [("sweep", 5 * RATE), ("noise", 16321), ("click", 9000), ("tone", 24001), ("noise", 8000)]


@pytest.fixture
def rules(tmp_path: Path) -> Callable[..., MelRules]:
    def read(name: str, nested: bool = False, **more: Any) -> MelRules:
        content = {**CHECKPOINTS[name], **more}
        file = "processor_config.json" if nested else "preprocessor_config.json"
        (tmp_path / file).write_text(json.dumps({"feature_extractor": content} if nested else content))
        return checkpoint_mel_rules(tmp_path)

    return read


def whisper(name: str) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=CHECKPOINTS[name]["feature_size"])


@pytest.mark.parametrize(("kind", "length"), SOUNDS)
@pytest.mark.parametrize("name", ["whisper", "whisper-large"])
def test_frames_equal_whispers(name: str, kind: str, length: int, rules: Callable[..., MelRules]) -> None:
    samples = sound(kind, length)
    told = log_mel(rules(name), samples)
    by_numpy = whisper(name)._np_extract_fbank_features(samples[None], "cpu")[0]
    by_torch = whisper(name)._torch_extract_fbank_features(samples[None])[0]
    assert told.dtype == np.float32 and told.shape == by_numpy.shape == by_torch.shape
    limits.numbers_agree("frames by numpy", told, by_numpy, NUMPY)
    limits.numbers_agree("frames by torch", told, by_torch, TORCH, size=1)


@pytest.mark.parametrize(("kind", "length"), [*SOUNDS, ("noise", 3000)])
def test_frames_equal_qwen3_asrs(kind: str, length: int, rules: Callable[..., MelRules]) -> None:
    """A short sound becomes half a second; the extractor fills its last window of frames up with zeros."""
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    samples = sound(kind, length)
    told = log_mel(rules("qwen3-asr"), samples)
    wanted = Qwen3ASRFeatureExtractor()(samples, sampling_rate=RATE, padding=True, return_tensors="np")[
        "input_features"
    ][0]
    count = max(length, 8000) // 160
    assert told.shape == (128, count) and not wanted[:, count:].any()
    limits.numbers_agree("frames", told, wanted[:, :count], TORCH, size=1)


@pytest.mark.parametrize(("kind", "length"), SOUNDS)
def test_frames_equal_gemma4s(kind: str, length: int, rules: Callable[..., MelRules]) -> None:
    """Its extractor is in numpy, with spectra in single precision. The frames that it masks are not there."""
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    samples = sound(kind, length)
    told = log_mel(rules("gemma4"), samples)
    wanted = Gemma4AudioFeatureExtractor()([samples], return_tensors="np")
    assert told.shape[1] == int(wanted["input_features_mask"].sum())
    limits.numbers_agree("frames", told.T, wanted["input_features"][0, : told.shape[1]], NUMPY)


@pytest.mark.parametrize(("kind", "length"), SOUNDS)
def test_frames_equal_granites_published_formula(kind: str, length: int, rules: Callable[..., MelRules]) -> None:
    """torchaudio, which its extractor needs, does not load here. The transform and the filters are transformers'."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    samples, of = sound(kind, length), rules("granite")
    filters = mel_filter_bank(257, 80, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
    mel = spectrogram(samples, window_function(400, "hann", frame_length=512), 512, 160, power=2.0, mel_filters=filters)
    logs = np.log10(np.maximum(mel, 1e-10)).T
    logs = np.maximum(logs, logs.max() - 8) / 4 + 1
    wanted = logs[: len(logs) // 2 * 2].reshape(-1, 160)
    limits.numbers_agree("frames", log_mel(of, samples).T, wanted, NUMPY)


@pytest.mark.parametrize(("name", "unit"), [("whisper", "slaney"), ("whisper-large", "slaney"), ("gemma4", None)])
def test_filters_are_those_of_transformers(name: str, unit: str | None, rules: Callable[..., MelRules]) -> None:
    from transformers.audio_utils import mel_filter_bank

    of = rules(name)
    wanted = mel_filter_bank(of.fft // 2 + 1, of.bins, 0.0, 8000.0, RATE, norm=unit, mel_scale=of.scale)
    width = 13  # Hz, of the narrowest bin; a share is a difference of frequencies over it
    limits.numbers_agree("shares", mel_filters(of), wanted, limits.roundings("fp64", 8), size=of.highest / width)


def test_a_long_sound_is_what_its_blocks_are(monkeypatch: pytest.MonkeyPatch, rules: Callable[..., MelRules]) -> None:
    samples, of = sound("sweep", 3 * RATE), rules("whisper")
    whole = log_mel(of, samples)
    assert whole.shape[1] < BLOCK
    monkeypatch.setattr("shardmill.media.mel.BLOCK", 7)
    np.testing.assert_array_equal(log_mel(of, samples), whole)


def test_silence_after_a_sound_changes_its_last_frames(rules: Callable[..., MelRules]) -> None:
    """So a model of fixed windows gets it before the frames are made."""
    samples, of = sound("noise", 16000), rules("whisper")
    alone, followed = log_mel(of, samples), log_mel(of, np.pad(samples, (0, 16000)))[:, :100]
    assert np.abs(alone - followed).max() > 0.01
    np.testing.assert_array_equal(alone[:, :98], followed[:, :98])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rules_are_the_same_after_they_were_written(name: str, rules: Callable[..., MelRules]) -> None:
    of = rules(name)
    assert read_mel_rules(json.loads(json.dumps(of.written()))) == of == rules(name, nested=True)


@pytest.mark.parametrize("length", [1, 159, 200])
@pytest.mark.parametrize("name", ["whisper", "gemma4", "granite"])
def test_a_sound_of_less_than_a_frame_is_refused(name: str, length: int, rules: Callable[..., MelRules]) -> None:
    with pytest.raises(MediaError, match="the sound is shorter than a frame"):
        log_mel(rules(name), sound("noise", length)[: length if name != "gemma4" else length // 2])


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("whisper", {"feature_extractor_type": "EncodecFeatureExtractor"}, "extractor 'EncodecFeatureExtractor'"),
        ("whisper", {"dither": 0.1}, "dither is 0.1, which no rules say"),
        ("gemma4", {"preemphasis": 0.97}, "preemphasis is 0.97"),
        ("gemma4", {"input_scale_factor": 2.0}, "input_scale_factor, which no rules say"),
    ],
)
def test_settings_that_no_rules_say_are_refused(
    name: str, more: dict[str, Any], said: str, rules: Callable[..., MelRules]
) -> None:
    with pytest.raises(CheckpointError, match=said):
        rules(name, **more)


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither preprocessor_config.json nor processor_config.json"):
        checkpoint_mel_rules(tmp_path)
