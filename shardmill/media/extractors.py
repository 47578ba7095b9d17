"""The rules for a checkpoint's sounds, read from the settings of its feature extractor. For builds: it needs torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.files import load_json
from shardmill.media.image_rules import Placeholder
from shardmill.media.mel import MelRules
from shardmill.media.processors import SETTINGS, processor_settings
from shardmill.media.sound_rules import SoundRules, Transcription

HIGHEST = 8000.0  # Hz; a constant in the code of Whisper's and Qwen3-ASR's extractors
EXTRACTORS = {  # the class of transformers -> its module in transformers.models
    "WhisperFeatureExtractor": "whisper",
    "Qwen3ASRFeatureExtractor": "qwen3_asr",
    "Gemma4AudioFeatureExtractor": "gemma4",
    "GraniteSpeechFeatureExtractor": "granite_speech",
}
UNSAID = ("dither", "do_normalize", "preemphasis", "fft_overdrive", "per_bin_mean", "per_bin_stddev")
GRANITE = {"sampling_rate": 16000, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80}  # its defaults


# What stands for a sound in a prompt, written in the code of transformers' processors, by the feature extractor.
ASR_TEXT = "<asr_text>"
TEXTS = {"Qwen3ASRFeatureExtractor": Placeholder(mark="<|audio_pad|>", row="<|audio_pad|>")}


def checkpoint_sound_rules(source: Path, tower: Mapping[str, Any]) -> SoundRules:
    """Return the rules for a checkpoint's sounds, whose tower has the rules `tower`, see runtime/tower.py.

    Raises:
        CheckpointError: if there are no rules for its feature extractor, or its tower or tokenizer contradicts them.
    """
    mel, settings = checkpoint_mel_rules(source), processor_settings(source, "feature_extractor", "a sound")
    name = str(settings.get("feature_extractor_type", ""))
    config = load_json(source / "config.json")
    if name not in TEXTS:
        raise CheckpointError(f"{source / SETTINGS}: sounds of {name} have no place in a prompt that is known here")
    bins = config["audio_config"].get("num_mel_bins", mel.bins)
    chunk = 2 * settings.get("n_window", tower["chunk"] // 2)
    if (mel.bins, chunk) != (bins, tower["chunk"]):
        theirs = f"frames of {mel.bins} bins, {chunk} in a chunk"
        raise CheckpointError(f"{source}: its feature extractor has {theirs}; config.json: {bins}, {tower['chunk']}")
    added = {one["content"]: one["id"] for one in load_json(source / "tokenizer.json").get("added_tokens", ())}
    row = TEXTS[name].row
    if (known := added.get(row)) is not None and known != config.get("audio_token_id", known):
        raise CheckpointError(f"{source}: {row} is token {known}, config.json has {config['audio_token_id']}")
    processing = importlib.import_module(f"transformers.models.{EXTRACTORS[name]}.processing_{EXTRACTORS[name]}")
    languages = dict(processing.LANGUAGE_CODE_TO_NAME)
    asked = Transcription("language {language}" + ASR_TEXT, ASR_TEXT, languages)
    return SoundRules(mel, tower["window"], tower["chunk"], tower["rows"], TEXTS[name], asked)


def checkpoint_mel_rules(source: Path) -> MelRules:
    """Return the rules for a checkpoint's sounds.

    Args:
        source: the folder with the checkpoint's settings.

    Raises:
        CheckpointError: if the settings are missing, or of a feature extractor that has no rules here.
    """
    settings = processor_settings(source, "feature_extractor", "a sound")
    name = str(settings.get("feature_extractor_type", ""))
    if name not in EXTRACTORS:
        known = ", ".join(sorted(EXTRACTORS))
        raise CheckpointError(f"{source / SETTINGS}: no rules for the feature extractor {name!r}; known are {known}")
    for key in UNSAID:
        if settings.get(key):
            raise CheckpointError(f"{source / SETTINGS}: {key} is {settings[key]}, which no rules say")
    if name == "GraniteSpeechFeatureExtractor":  # the class can't be made without torchaudio
        return _granite({**GRANITE, **settings})
    rest = {key: value for key, value in settings.items() if key not in ("feature_extractor_type", "processor_class")}
    module = importlib.import_module(f"transformers.models.{EXTRACTORS[name]}.feature_extraction_{EXTRACTORS[name]}")
    extractor = getattr(module, name)(**rest)
    if name == "Gemma4AudioFeatureExtractor":
        return _gemma4(source, extractor)
    return MelRules(
        rate=extractor.sampling_rate,
        bins=extractor.feature_size,
        window=extractor.n_fft,
        fft=extractor.n_fft,
        hop=extractor.hop_length,
        scale="slaney",
        highest=HIGHEST,
        lead="reflect",
        power=2,
        log="decades",
        floor=1e-10,
        least=getattr(extractor, "min_length", 0),
    )


def _gemma4(source: Path, extractor: Any) -> MelRules:
    if extractor.min_frequency or extractor.input_scale_factor != 1:
        raise CheckpointError(f"{source / SETTINGS}: min_frequency or input_scale_factor, which no rules say")
    return MelRules(
        rate=extractor.sampling_rate,
        bins=extractor.feature_size,
        window=extractor.frame_length,
        fft=extractor.fft_length,
        hop=extractor.hop_length,
        scale="htk",
        highest=extractor.max_frequency,
        lead="zeros",
        power=1,
        log="natural",
        floor=float(extractor.mel_floor),
        last=True,
        single=True,
    )


def _granite(settings: Mapping[str, Any]) -> MelRules:
    return MelRules(
        rate=settings["sampling_rate"],
        bins=settings.get("feature_size") or settings["n_mels"],
        window=settings["win_length"],
        fft=settings["n_fft"],
        hop=settings["hop_length"],
        scale="htk",
        highest=settings["sampling_rate"] / 2,
        lead="reflect",
        power=2,
        log="decades",
        floor=1e-10,
        last=True,
        stack=2,
    )
