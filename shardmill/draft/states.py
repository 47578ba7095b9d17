"""What a model computes for a text: hidden states for each window of its tokens, in files that a second run keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardmill.files import replacing

WINDOW = 256  # tokens of a window; each is a separate text
TOGETHER = 8  # windows that the model runs at once
KEPT_TOGETHER = 64  # windows in a file


@dataclass(frozen=True)
class Windows:
    """Windows of a text and what the model computes for them.

    Attributes:
        tokens: [windows, n].
        taps: the hidden states that a head reads, [windows, n, 3 d], in fp16.
        last: the input of the LM head, [windows, n, d], in fp16.
    """

    tokens: Tensor
    taps: Tensor
    last: Tensor


def load_reference(source: Path) -> Any:
    """Return transformers' model of a checkpoint in fp32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def compute_windows(model: Any, tokens: Tensor, taps: Sequence[int]) -> Windows:
    """Return what transformers' model computes for tokens [windows, n].

    Args:
        model: transformers' model.
        tokens: the tokens.
        taps: the layers whose inputs a head reads.
    """
    out = model.model(tokens, output_hidden_states=True, use_cache=False)
    tapped = torch.cat([out.hidden_states[layer] for layer in taps], dim=-1)
    return Windows(tokens, tapped.half(), out.last_hidden_state.half())


def windows_of(tokens: Sequence[int]) -> Tensor:
    """Return the tokens in windows, [windows, WINDOW]; the last ones, which fill no window, are left out."""
    count = len(tokens) // WINDOW
    return torch.tensor(tokens[: count * WINDOW]).view(count, WINDOW)


def kept_windows(folder: Path, model: Any, tokens: Tensor, taps: Sequence[int], say: Callable[[str], None]) -> Windows:
    """Return what a model computes for windows, which are computed unless files in `folder` hold them.

    Args:
        folder: the files' folder, for this model and these windows only. Each file appears whole or not at all.
        model: transformers' model.
        tokens: the windows, [windows, n].
        taps: see `compute_windows`.
        say: told how far it is.
    """
    found = list(_files(folder, model, tokens, taps, say))
    names = ("taps", "last")
    return Windows(tokens, *(torch.cat([one[name] for one in found]) for name in names))


def _files(
    folder: Path, model: Any, tokens: Tensor, taps: Sequence[int], say: Callable[[str], None]
) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(tokens), KEPT_TOGETHER):
        file, group = folder / f"states_{start:06d}.safetensors", tokens[start : start + KEPT_TOGETHER]
        if not file.is_file():
            made = [compute_windows(model, some, taps) for some in torch.split(group, TOGETHER)]
            held = {name: torch.cat([getattr(one, name) for one in made]) for name in ("taps", "last")}
            with replacing(file) as fresh:
                save_file(held, fresh)
            say(f"hidden states of {min(start + KEPT_TOGETHER, len(tokens)) * tokens.shape[1]} tokens")
        yield load_file(file)
