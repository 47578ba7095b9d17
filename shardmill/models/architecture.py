"""What a decoder is made of, as numbers: read from a Hugging Face config through transformers' own AutoConfig.

config.json comes in two generations (`rope_scaling`, and `rope_parameters` from transformers 5 on); AutoConfig reads
both, so nothing here looks at the file itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models import type_fault

SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "head_dim",
)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding as the host computes it: angle(position, i) = position * inv_freq[i]."""

    inv_freq: tuple[float, ...]  # [rope_dim / 2], radians per position
    scale: float  # LongRoPE's attention factor: cos and sin are multiplied by it
    factors: str  # "default", "short" or "long": which list of factors inv_freq was made from

    @property
    def dim(self) -> int:
        """Rotated dimensions of each head."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Graph:
    """The numbers that fix the graph of a layer and of a head; with the weights they decide a package's bytes."""

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    ffn: int
    rms_norm_eps: float

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Architecture:
    """A whole decoder."""

    graph: Graph
    layers: int
    vocab: int
    tied: bool  # the LM head is the embedding table
    max_positions: int
    rope: Rope


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the tensors that parts are made of."""

    by_layer: tuple[tuple[str, ...], ...]
    final_norm: str
    head: str
    embedding: str

    def layers(self, start: int, end: int) -> list[str]:
        """Names of all tensors of layers [start, end)."""
        return [name for layer in self.by_layer[start:end] for name in layer]


def size_fault(content: Any) -> str:
    """Which size of a parsed config.json is none, in words; empty if all are. One that is left out has a default."""
    if not isinstance(content, dict):
        return "not a model's config"
    sizes = {name: content[name] for name in SIZES if content.get(name) is not None}
    wrong = [f"{name} is {size!r}: it must be 1 or more" for name, size in sizes.items() if not is_size(size)]
    return wrong[0] if wrong else ""


def is_size(value: Any) -> bool:
    """Whether it is a whole number from 1 on; true and false are none."""
    return type(value) is int and value >= 1


def load_hf_config(folder: Path) -> Any:
    """transformers' config of the checkpoint in `folder`.

    Raises CheckpointError where config.json is missing, holds what no model can be, or names a model_type that is not
    supported. Code that a checkpoint brings along is never run, nor is anybody asked whether to.
    """
    from transformers import AutoConfig

    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wrong = size_fault(content) or type_fault(content.get("model_type"))
        if wrong:
            raise ValueError(wrong)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of it
        raise CheckpointError(f"{folder}/config.json can't be read as a model config: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says at once; of one that announces the fault with a colon, the fault too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
