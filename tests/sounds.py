"""Small models with a tower for sounds, in which everything a tower could get wrong matters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from models.tiny_families import tensors_of, tiny_model
from mtp_layers import halved
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer

BINS, WINDOW, CHUNK, MARK = 32, 300, 100, 256
FRAMES = [100, 300]
TEXT = "<|audio_pad|>"
AUDIO: dict[str, Any] = {
    "num_mel_bins": BINS,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "d_model": 64,
    "output_dim": 64,
    "n_window_infer": WINDOW,
    "downsample_hidden_size": 8,
}
EXTRACTOR = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": BINS, "sampling_rate": 16000}
FREE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def hearing(**changes: Any) -> Any:
    """transformers' tiny model, whose tower has drawn weights that fp16 holds."""
    of_text = {"vocab_size": 264, "tie_word_embeddings": True, **FREE, **changes}
    model = tiny_model("qwen3_asr", audio_config=AUDIO, audio_token_id=MARK, **of_text)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if "audio_tower" in name or "projector" in name:
                weight.copy_(_drawn(name, weight, generator))
            weight.copy_(halved(name, weight))
    return model


def _drawn(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Gains around one, and projections with which attention is peaked and every branch counts."""
    noise = torch.rand(weight.shape, generator=generator) * 2 - 1
    if weight.ndim == 1:
        normed = "norm" in name or "ln_post" in name
        return 0.3 * noise + float(normed and name.endswith("weight"))
    gain = 2.5 if "q_proj" in name or "k_proj" in name or "conv" in name else 1.5
    return gain * noise / weight[0].numel() ** 0.5


def tokenizer() -> Tokenizer:
    """The tests' tokenizer, with the token of a sound's rows."""
    made = json.loads(tiny.train_tokenizer().to_str())
    made["added_tokens"].append({"id": MARK, "content": TEXT, "special": True} | SINGLE)
    return Tokenizer.from_str(json.dumps(made))


SINGLE = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def write_hearing(folder: Path, **changes: Any) -> Path:
    """Writes a checkpoint in fp16, with config, tokenizer and the settings of its feature extractor."""
    model = hearing(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(json.dumps(model.config.to_dict(), default=str))
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    stored = {n: each.half().contiguous() for n, each in tensors_of(model).items() if n != "lm_head.weight"}
    save_file(stored, folder / "model.safetensors")
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def clip(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """A made-up sound at 16 kHz: tones that change, and noise."""
    time = np.arange(round(seconds * 16000)) / 16000
    random = np.random.default_rng(seed)
    tones = sum(np.sin(2 * np.pi * random.uniform(100, 3000) * time * (1 + 0.1 * time)) for _ in range(3))
    return (0.2 * tones + 0.05 * random.standard_normal(len(time))).astype(np.float32)


def given(frames: Sequence[NDArray[np.float32]]) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model for sounds, given their frames [bins, n]."""
    longest = max(-(-each.shape[1] // CHUNK) * CHUNK for each in frames)
    features, mask = torch.zeros(len(frames), BINS, longest), torch.zeros(len(frames), longest, dtype=torch.long)
    for place, each in enumerate(frames):
        features[place, :, : each.shape[1]] = torch.from_numpy(each)
        mask[place, : each.shape[1]] = 1
    return {"input_features": features, "input_features_mask": mask}
