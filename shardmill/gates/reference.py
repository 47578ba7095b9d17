"""The reference for parity: Hugging Face transformers' own modules, one layer in memory at a time.

Weights come from a callable, so the same code runs the original checkpoint (what did INT8 and fp16 cost?) and the
weights dequantised from the packages (is the program the graph?). Everything is fp32, attention is transformers' eager.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmill.checkpoint.headers import read_tensors
from shardmill.convert.weights import read
from shardmill.models.architecture import load_hf_config
from shardmill.plan import Part, whole

HEAD_ROWS = 16384
Weights = Callable[[str], Tensor]  # the checkpoint's name -> values in any float dtype


def checkpoint_weights(source: Path) -> Weights:
    """The checkpoint's weights in their own dtype, mapped into memory and read when they are used."""
    tensors = read_tensors(source)
    return lambda name: read(whole(tensors[name]), source)


def part_weights(part: Part, source: Path) -> Weights:
    """The same for a part, whose tensors may be rows of the checkpoint's."""
    tensors = {tensor.name.split("[")[0]: tensor for tensor in part.tensors}
    return lambda name: read(tensors[name], source)


class Reference:
    """transformers' decoder for a checkpoint's config, without weights."""

    def __init__(self, source: Path, context: int) -> None:
        """Args: folder with config.json; the length of the whole sequence, which decides LongRoPE's factors."""
        from transformers import AutoModelForCausalLM

        config = load_hf_config(source)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
        decoder = self.model.model
        # As transformers computes them for a sequence of `context` tokens, of which a test may feed fewer.
        positions = torch.arange(context)[None]
        with torch.no_grad():
            self.cos, self.sin = type(decoder.rotary_emb)(config)(torch.zeros(1), positions)  # [1, context, rope_dim]

    @torch.no_grad()
    def layers(self, hidden: Tensor, indices: Iterable[int], weights: Weights) -> list[Tensor]:
        """Outputs of the layers in turn, each [n, d], for inputs [n, d] at positions 0 .. n - 1."""
        n = len(hidden)
        rope = self.cos[:, :n], self.sin[:, :n]
        mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1)
        outputs = []
        for i in indices:
            layer = load(self.model.model.layers[i], f"model.layers.{i}.", weights)
            result = layer(hidden[None], attention_mask=mask, position_embeddings=rope)
            hidden = (result[0] if isinstance(result, tuple) else result)[0]
            layer.to("meta")
            outputs.append(hidden)
        give_back()
        return outputs

    @torch.no_grad()
    def norm(self, hidden: Tensor, weights: Weights) -> Tensor:
        """The final norm of [n, d]."""
        result: Tensor = load(self.model.model.norm, "model.norm.", weights)(hidden)
        return result


def give_back() -> None:
    """Returns freed memory to the system: glibc keeps what lies between blocks in use, hundreds of MB by now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def load(module: Any, prefix: str, weights: Weights) -> Any:
    """The module with its weights assigned."""
    names = list(module.state_dict())
    module.load_state_dict({name: weights(prefix + name).float() for name in names}, assign=True)
    return module.eval()


def run(
    reference: Reference, tokens: Sequence[int], table: Tensor, head: Iterable[Tensor], weights: Weights
) -> dict[str, Tensor]:
    """A whole forward pass: hidden [layers + 1, n, d] (the embedding first) and logits [n, vocab].

    Args: table the embedding [vocab, d]; head the LM head's rows [vocab, d] in blocks; both in any float dtype.
    """
    hidden = [table[list(tokens)].float()]
    hidden += reference.layers(hidden[0], range(len(reference.model.model.layers)), weights)
    logits = project(reference.norm(hidden[-1], weights), head)
    return {"hidden": torch.stack(hidden), "logits": logits}


def project(hidden: Tensor, head: Iterable[Tensor]) -> Tensor:
    """Logits [n, vocab] in fp32, a block of the head's rows at a time: a head in fp32 may take gigabytes."""
    return torch.cat([hidden @ rows.float().T for rows in head], dim=1)
