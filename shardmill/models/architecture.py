"""What a decoder is made of, as numbers: read from a Hugging Face config through transformers' own AutoConfig.

config.json comes in two generations (`rope_scaling`, and `rope_parameters` from transformers 5 on); AutoConfig reads
both, so nothing here looks at the file itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.errors import CheckpointError


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


def load_hf_config(folder: Path) -> Any:
    """transformers' config of the checkpoint in `folder`.

    Raises CheckpointError where config.json is missing or names an architecture transformers does not know.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder}/config.json can't be read as a model config: {first}") from error
