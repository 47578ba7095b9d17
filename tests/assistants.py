"""A small Gemma 4 and its assistant: checkpoints, transformers' models, and transformers' own assisted generation.

transformers 5.23.0 has two faults there. It can't build an assistant, because `kv_sharing_modes` raises if all layers
share. And a draft sees the key and value of the rejected token before it. `mended` gives it what it means to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tiny
import torch
from models.tiny_configs import BASE, GEMMA4, UNIFIED
from models.tiny_families import tiny_model
from safetensors.torch import save_file

from shardmill.gates.assistant import buildable

VOCAB, DRAFTS, STATE = 8, 3, {"state": "host"}
FREE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LAYERS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}


def target(kind: str = "gemma4_text", vocab: int = VOCAB) -> Any:
    """transformers' tiny model, with weights that fp16 holds."""
    rows = {"vocab_size_per_layer_input": vocab} if kind == "gemma4_text" else {}
    with buildable():
        return halved(tiny_model(kind, vocab_size=vocab, **rows, **FREE))


def assistant(kind: str = "gemma4_text", seed: int = 3, **changes: Any) -> Any:
    """transformers' assistant for that model; `changes` go into the config of its layers."""
    import transformers

    name = "Gemma4Assistant" if kind == "gemma4_text" else "Gemma4UnifiedAssistant"
    shared = GEMMA4 | {"use_double_wide_mlp": False} if kind == "gemma4_text" else UNIFIED
    own = {key: value for key, value in {**BASE, **shared, **LAYERS, **FREE}.items() if "per_layer" not in key}
    own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0} if kind == "gemma4_text" else {}
    own |= {"model_type": kind, "num_kv_shared_layers": 4, **changes}
    torch.manual_seed(seed)
    with buildable():
        config = getattr(transformers, f"{name}Config")(text_config=own, backbone_hidden_size=64)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for path, weight in model.state_dict().items():
            if weight.ndim == 1 and weight.is_floating_point():
                centre = 0.4 if "q_norm" in path else 1.0
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator) + centre)
    return halved(model)


def halved(model: Any) -> Any:
    """The model in fp32, with weights rounded to fp16."""
    with torch.no_grad():
        for weight in model.state_dict().values():
            if weight.is_floating_point():
                weight.copy_(weight.half().float())
    return model


def write(model: Any, folder: Path) -> Path:
    """Writes a checkpoint of a model in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    tied = {"lm_head.weight"}
    tensors = {name: each.half().contiguous() for name, each in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors")
    return folder


def build(folder: Path, model: Any, helper: Any, quantization: str = "fp16", **changes: Any) -> tiny.Build:
    """A build of a model with its assistant; `changes` go into the config."""
    checkpoint = write(model, folder / "checkpoint")
    tiny.train_tokenizer().save(str(checkpoint / "tokenizer.json"))
    source = tiny.fetched(checkpoint, folder / "source")
    tiny.fetched(write(helper, folder / "assistant"), source / "drafter")
    settings = {"topology": "auto", "drafter": {"path": str(folder / "assistant")}, "program": STATE} | changes
    return tiny.converted(source, folder, quantization=quantization, **settings)


@dataclass(frozen=True)
class Round:
    """A draft, the length of the text before it, and how many of its tokens were accepted."""

    at: int
    draft: tuple[int, ...]
    accepted: int


@contextmanager
def mended(window: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Let drafts of transformers see the positions before their own only; yield the drafts, each with its place."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    drafts, get = list[tuple[int, list[int]]](), Generator.get_candidates

    def clean(self: Any, input_ids: Any, model_kwargs: Any, model_outputs: Any, *args: Any, **more: Any) -> Any:
        length = input_ids.shape[1]
        if model_outputs is not None:
            states = model_outputs.shared_kv_states
            end = states["full_attention"][0].shape[2]  # positions that the model has been at, rejected ones included
            for name, pair in states.items():
                first = end - pair[0].shape[2]
                start = max(length - window - first, 0) if name == "sliding_attention" else 0
                states[name] = tuple(each[:, :, start : length - 1 - first] for each in pair)
        found = get(self, input_ids, model_kwargs, model_outputs, *args, **more)
        drafts.append((length, found[0][0, length:].tolist()))
        return found

    with mock.patch.object(Generator, "get_candidates", clean):
        yield drafts


def theirs(model: Any, helper: Any, prompt: list[int], count: int) -> tuple[list[int], list[Round]]:
    """transformers' text of `count` tokens after the prompt, and its drafts."""
    helper.generation_config.num_assistant_tokens = DRAFTS
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    options = {"max_new_tokens": count, "do_sample": False, "use_cache": True, "assistant_model": helper}
    with buildable(), mended(model.config.get_text_config().sliding_window) as drafts:
        text = model.generate(torch.tensor([prompt]), **options)[0].tolist()
    ends = [*(at for at, _ in drafts[1:]), len(text)]
    rounds = [Round(at, tuple(d), end - at - 1) for (at, d), end in zip(drafts, ends, strict=True) if d]
    return text[len(prompt) :], rounds
