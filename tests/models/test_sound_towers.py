"""Towers for sounds: descriptions that programs can honour, buckets that layers can have, and rules of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sounds

from shardmill import config, topology
from shardmill.errors import CheckpointError, ConfigError
from shardmill.media.extractors import checkpoint_sound_rules
from shardmill.media.sound_rules import read_sound_rules, windows
from shardmill.models import DECODER, family
from shardmill.models.contract import GraphSpec
from shardmill.models.hf_config import load_hf_config, model_description
from shardmill.models.part_kinds import inputs, tower_spec
from shardmill.models.towers import describe_tower, with_tower

SETTINGS = {"model": "m", "source": {"repo": "a/b"}, "context": 64}
TOWER = {"chunk": 100, "rows": 13, "window": 300}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sounds.write_hearing(tmp_path_factory.mktemp("hearing"))


def test_a_program_s_inputs_have_chunks_and_tokens() -> None:
    tower = describe_tower(sounds.hearing().config, "audio").architecture
    spec: GraphSpec = tower_spec(tower, 300)
    assert spec.tokens == 39 and inputs(spec) == {
        "x": (3, 1, sounds.BINS, 100),
        "positions": (1, 64, 1, 13),
        "key_mask": (1, 1, 1, 39),
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an activation": ({"activation_function": "quick_gelu"}, "activation_function 'quick_gelu': programs have"),
    "heads of a broken width": ({"encoder_attention_heads": 3}, "3 heads do not divide d_model 64"),
    "chunks of another length": ({"n_window": 60}, "n_window, n_window_infer or max_position_embeddings"),
    "a window of half a chunk": ({"n_window_infer": 250}, "n_window, n_window_infer or max_position_embeddings"),
    "a width that nobody has": ({"d_model": 1 << 20}, "d_model is 1048576: it must be 1 to 8192"),
    "no layers": ({"encoder_layers": 0}, "encoder_layers is 0: it must be 1"),
    "a null": ({"num_mel_bins": None}, "a field of audio_config is null"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_programs_can_t_honour_is_refused_in_one_line(name: str) -> None:
    changes, said = REFUSED[name]
    whole = sounds.hearing().config
    for key, value in changes.items():
        object.__setattr__(whole.audio_config, key, value)
    with pytest.raises(CheckpointError, match=said):
        describe_tower(whole, "audio")


def test_a_tower_is_asked_for_by_what_it_takes() -> None:
    with pytest.raises(CheckpointError, match="images: the tower of 'qwen3_asr' is for audio; write `audio`"):
        describe_tower(sounds.hearing().config)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([100, 250, 300], "audio.frames: 250 is no multiple of the 100 frames of a chunk"),
        ([100, 200], "audio.frames: layers see 300 frames at once, so the largest program has 300"),
        ([300, 400], "audio.frames: layers see 300 frames at once, so the largest program has 300"),
    ],
)
def test_programs_that_would_be_another_model_are_refused(frames: list[int], said: str, checkpoint: Path) -> None:
    hf = load_hf_config(checkpoint)
    a = with_tower(model_description(family(hf.model_type, DECODER), hf, 64), checkpoint, "audio").architecture
    with pytest.raises(ConfigError) as caught:
        topology.resolve_topology(config.parse({**SETTINGS, "audio": {"frames": frames}}), a)
    assert str(caught.value) == said
    whole = topology.resolve_topology(config.parse({**SETTINGS, "audio": {"frames": sounds.FRAMES}}), a)
    assert whole.parts[-2:] == ("tower_100", "tower_300")


def changed(checkpoint: Path, folder: Path, name: str, **changes: Any) -> Path:
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **changes}))
    return folder


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "another extractor": (
        "preprocessor_config.json",
        {"feature_extractor_type": "WhisperFeatureExtractor"},
        "sounds of WhisperFeatureExtractor have no place in a prompt",
    ),
    "other bins": ("preprocessor_config.json", {"feature_size": 80}, "frames of 80 bins, 100 in a chunk"),
    "other chunks": ("preprocessor_config.json", {"n_window": 60}, "frames of 32 bins, 120 in a chunk"),
    "noise": ("preprocessor_config.json", {"dither": 0.1}, "dither is 0.1, which no rules say"),
    "another token": ("config.json", {"audio_token_id": 7}, r"is token 256, config.json has 7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_contradict_the_tower_are_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    file, changes, said = WRONG[name]
    with pytest.raises(CheckpointError, match=said):
        checkpoint_sound_rules(changed(checkpoint, tmp_path, file, **changes), TOWER)


def test_a_checkpoint_s_rules_are_read_back_from_json(checkpoint: Path) -> None:
    rules = checkpoint_sound_rules(checkpoint, TOWER)
    assert read_sound_rules(json.loads(json.dumps(rules.written()))) == rules
    assert rules.transcription is not None and rules.transcription.languages["de"] == "German"
    assert [window.grid for window in windows(rules, sounds.clip(3.97))] == [(1, 300), (1, 97)]
    assert [window.grid for window in windows(rules, sounds.clip(0.1))] == [(1, 50)]  # silence follows
