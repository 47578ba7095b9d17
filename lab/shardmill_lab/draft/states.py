"""Texts, given whole or written by a model, and its hidden states there, in files that a second run keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardmill.files import replacing
from shardmill_lab.draft import windows

TOGETHER = 32  # texts that the model writes at once, and that a file holds


@dataclass(frozen=True)
class Windows:
    """Texts and what the model computes for them.

    Attributes:
        tokens: [texts, n]; what follows an answer that ended counts for nothing.
        own: whether a draft may hold the token: the model has chosen it, or the text is learnt as it is, [texts, n].
        taps: the hidden states that a head reads, [texts, n, 3 d], in fp16.
        last: the input of the LM head, [texts, n, d], in fp16.
    """

    tokens: Tensor
    own: Tensor
    taps: Tensor
    last: Tensor


NAMES = ("tokens", "own", "taps", "last")


@cache
def multiplies_bf16() -> bool:
    """Return whether this processor multiplies in bf16; one that can't is slower with it than with fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def load_reference(source: Path) -> Any:
    """Return transformers' model of a checkpoint in fp32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def multiply_in_bf16(model: Any) -> None:
    """Let a model's matrices multiply in bf16, if the processor can. Everything between them stays in fp32."""
    if not multiplies_bf16():
        return
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.bfloat16(), False)  # not in place: the embedding may be tied
            module.bias = module.bias if module.bias is None else nn.Parameter(module.bias.bfloat16(), False)
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
            module.register_forward_hook(lambda _, __, output: output.float())


def embedding_table(model: Any, plan: Mapping[str, Any]) -> Tensor:
    """Return the embedding of each token as the model's first layer reads it in the programs of a plan, [vocab, d]."""
    shape = plan["architecture"]
    table: Tensor = model.get_input_embeddings().weight * (shape["embedding_scale"] / shape["graph"]["stream_scale"])
    return table


@torch.no_grad()
def continued(model: Any, prompts: Sequence[Sequence[int]], taps: Sequence[int], window: int) -> Windows:
    """Return what a model writes after prompts, greedily, until it ends or the window is full.

    A prompt that fills the window is a text to be learnt as it is: all its tokens count as the model's own.

    Args:
        model: transformers' model.
        prompts: tokens, none more than the window.
        taps: the layers whose inputs a head reads.
        window: tokens of a text with its prompt.
    """
    lengths = torch.tensor([len(one) for one in prompts])[:, None]
    tokens = torch.zeros(len(prompts), window, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    written, whole, ends = torch.arange(window) >= lengths, lengths == window, _ends(model)
    pieces, cache, fed = list[tuple[Tensor, Tensor]](), None, 0
    for known in range(int(lengths.min()), window + 1):
        out = model.model(tokens[:, fed:known], past_key_values=cache, use_cache=True, output_hidden_states=True)
        tapped = torch.cat([out.hidden_states[layer] for layer in taps], dim=-1)
        pieces.append((tapped.half(), out.last_hidden_state.half()))
        cache, fed = out.past_key_values, known
        if known < window:
            chosen = model.get_output_embeddings()(out.last_hidden_state[:, -1]).argmax(-1)
            tokens[:, known] = torch.where(written[:, known], chosen, tokens[:, known])
            ended = written[:, known] & torch.isin(tokens[:, known], ends)
            written[ended, known + 1 :] = False
        if not (written | whole)[:, known:].any():
            break
    states = (torch.cat(each, dim=1) for each in zip(*pieces, strict=True))
    return Windows(tokens, written | whole, *(nn.functional.pad(each, (0, 0, 0, window - fed)) for each in states))


def _ends(model: Any) -> Tensor:
    """Return the tokens that end a model's text."""
    ids = model.generation_config.eos_token_id
    return torch.tensor([] if ids is None else ids, dtype=torch.long).view(-1)


def kept_windows(
    folder: Path, model: Any, prompts: Sequence[Sequence[int]], taps: Sequence[int], say: Callable[[str], None]
) -> Windows:
    """Return what a model writes after prompts; it is computed unless files in `folder` hold it.

    Args:
        folder: the files' folder, for this model and these prompts only. Each file appears whole or not at all.
        model: transformers' model.
        prompts: see `continued`; prompts of one length are the fastest together, so they are sorted by it.
        taps: see `continued`.
        say: told how far it is.
    """
    parts = list(_files(folder, model, sorted(prompts, key=len), taps, say))
    return Windows(*(torch.cat([one[name] for one in parts]) for name in NAMES))


def _files(
    folder: Path, model: Any, prompts: Sequence[Sequence[int]], taps: Sequence[int], say: Callable[[str], None]
) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(prompts), TOGETHER):
        file = folder / f"states_{start:06d}.safetensors"
        if not file.is_file():
            made = continued(model, prompts[start : start + TOGETHER], taps, windows.WINDOW)
            with replacing(file) as fresh:
                save_file({name: getattr(made, name).contiguous() for name in NAMES}, fresh)
            say(f"{min(start + TOGETHER, len(prompts))} of {len(prompts)} texts written")
        yield load_file(file)
