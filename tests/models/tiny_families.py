"""A tiny model for every family, checkpoints of them, and their blocks in PyTorch behind an engine's calls.

Default weights hide mistakes: gains of one, biases of zero and projections so small that attention is uniform. So every
vector is drawn, and projections are large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from drafted_decoding.engine import PlainEngine
from kit_runner.figures import relative_error
from torch import Tensor

from shardmill import models
from shardmill.gates.disturbed import disturbed, longest_sum
from shardmill.gates.passes import Pass
from shardmill.gates.stack import feed
from shardmill.models.architecture import ModelDescription, TensorSource, blocks
from shardmill.models.contract import PER_LAYER, GraphSpec, window_slots
from shardmill.models.part_kinds import constants, inputs, table_constants
from shardmill.models.parts import build
from shardmill.models.sources import assembled, turned
from shardmill.plan import recurrent
from shardmill.runtime.kv import Floats, KVLayout, token_rows

from .tiny_configs import VOCAB, tiny_config

if TYPE_CHECKING:
    import limits

SLOTS, TEXT = 64, 40
TURNED = 1e-3  # a limit beyond this, where mistakes of a graph begin, means that noise turned a choice of experts


def tiny_model(model_type: str, **changes: Any) -> Any:
    """transformers' tiny model of a family in fp32, the same for the same arguments."""
    from tiny import auto_class
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    # With its vision tower: the class for text alone takes the same config.
    kind = AutoModelForImageTextToText if model_type in ("qwen3_5", "qwen3_5_moe") else auto_class(config)
    model = kind.from_config(config, attn_implementation="eager").eval()
    centre = 0.0 if model_type.startswith(("gemma2", "gemma3", "qwen3_5")) else 1.0  # their gains are 1 + weight
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.ndim == 1 or "conv.conv" in name or "_bias" in name:
                drawn = 0.3 * torch.randn(weight.shape, generator=generator)
                weight.copy_(drawn + (centre if "norm" in name or name.endswith(("_scale", "layer_scalar")) else 0.0))
                if model_type.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                    weight.sub_(0.7)  # scores are not divided, and large ones amplify rounding
            if any(path in name for path in ("linear_attn", "mamba", "mixer", "temporal_block")):
                _draw_recurrence(name, weight, generator)
    return model


def _draw_recurrence(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Draw the tensors of a recurrence that are no projections, with heads that forget slowly and quickly."""
    if name.endswith("linear_attn.norm.weight"):
        weight.add_(1.0)  # the only gain without 1 +
    elif name.endswith("A_log"):
        weight.uniform_(-4, 2.7, generator=generator)
    elif name.endswith("dt_bias"):
        weight.copy_(2 * torch.randn(weight.shape, generator=generator) - 1)
    elif name.endswith("conv1d.weight"):
        weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    elif name.endswith("recurrent_param"):
        weight.uniform_(-9, 3, generator=generator)
    elif name.endswith("_gate_weight"):
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


def tensors_of(model: Any) -> dict[str, Tensor]:
    """A model's tensors by the names that they have on the hub, which may not be those in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, model.state_dict())  # type: ignore[no-any-return]


def described(model: Any, slots: int = SLOTS) -> ModelDescription:
    """Our description of one of transformers' models, by the names that its tensors have in memory."""
    config = model.config.get_text_config()
    found: ModelDescription = models.family(model.config.model_type).describe(config, slots)
    return found.stored_as(tensors_of(model))


def weights_of(model: ModelDescription, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The constants of all programs by their paths."""
    a = model.architecture
    shapes = constants(GraphSpec("layers", a.graph, tuple(enumerate(a.kinds)))) | constants(
        GraphSpec("head", a.graph, rows=a.vocab)
    )
    shapes |= table_constants(a)
    return {path: _constant(blocks(model.sources[path]), tensors, shape) for path, shape in shapes.items()}


def _constant(sources: Sequence[TensorSource], tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """A constant from the tensors of its sources."""
    found = []
    for source in sources:
        stored = tensors[source.tensor] if source.index is None else tensors[source.tensor][source.index]
        beside = [tensors[name] for name in (source.plus, source.by) if name]
        found.append(turned(stored, source, beside).float())
    return assembled(found, shape)


class Blocks(PlainEngine):
    """The PyTorch blocks of a whole model and the contract's Host, called as an engine is."""

    widths, verify, tokens_max = (1, 2, 3, 4), 4, 4

    def __init__(
        self,
        model: ModelDescription,
        tensors: Mapping[str, Tensor],
        slots: int = SLOTS,
        host: type[KVLayout] = KVLayout,
    ):
        a = model.architecture
        ring = window_slots(a.window, self.tokens_max, slots)
        spec = GraphSpec("layers", a.graph, tuple(enumerate(a.kinds)), slots, ring)
        weights = weights_of(model, tensors)
        self.slots, self.vocab, self.names = slots, a.vocab, list(inputs(spec))
        self.table, self.carry = weights["embedding"], a.graph.carry
        self.rows, self.count = weights.get(PER_LAYER), a.layers
        self.layers, self.head = build(spec, weights), build(GraphSpec("head", a.graph, rows=a.vocab), weights)
        ropes = {name: asdict(table) for name, table in a.ropes.items()}
        known = {"context": slots, "rope": ropes, "window": a.window, "window_slots": ring}
        known |= recurrent(a.graph, self.tokens_max, self.verify)
        self.host = host(known | {"conv_taps": a.graph.conv_taps})

    def reset(self) -> None:
        """Forgets every slot."""
        self.host.reset()

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """Writes each token's key and value into its slot and returns float32 logits [T, vocab]."""
        x = self.table[list(tokens)].T[None, :, :, None]  # [1, d, T, 1]
        arrays = self.host.arrays(slots, positions) | {"embedded": x}
        arrays |= token_rows(self.rows.numpy(), tokens, self.count) if self.rows is not None else {}
        given = {name: torch.as_tensor(arrays[name]) for name in self.names if name != "x"}
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.carry))
        logits: Tensor = self.head(self.layers(x, *given.values()))[0, :, :, 0].T
        return logits.numpy()


def tiny_text(length: int = TEXT) -> list[int]:
    """Tokens to feed."""
    return [int(token) for token in np.random.default_rng(2).integers(0, VOCAB, length)]


@torch.no_grad()
def expected(model: Any, tokens: Sequence[int]) -> Floats:
    """Logits [n, vocab] of transformers' full forward pass, without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.numpy()


def limit_of(model: Any, drawn: Sequence[int] = ()) -> limits.Limit:
    """How far off the logits of one of transformers' models may be in fp32, by its depth and widths.

    A config that was drawn may have scores that amplify errors. So its model is disturbed over a text, `drawn`, by
    noise of sixteen roundings; noise that turns a choice of experts says nothing about rounding.
    """
    import limits  # whoever only makes tiny models needs no path to it

    found = limits.model(model.config.get_text_config().num_hidden_layers, longest_sum(model))
    if not drawn:
        return found
    exact, noise = expected(model, drawn), 16 * limits.UNITS["fp32"]
    with disturbed(model, noise):
        by = limits.error(expected(model, drawn), exact) * limits.UNITS["fp32"] / noise
    amplified = limits.moved(by, longest_sum(model))
    return max(found, amplified, key=lambda limit: limit.value) if amplified.value < TURNED else found


def random_passes(length: int, seed: int) -> list[Pass]:
    """Passes of 1 to 4 tokens at random; in some of them the last tokens are wrong and not kept."""
    rng, start, found = np.random.default_rng(seed), 0, []
    while start < length:
        end = min(start + int(rng.integers(1, 5)), length)
        positions = tuple(range(start, end))
        kept = int(rng.integers(1, end - start + 1))
        wrong = tuple(int(i) for i in rng.integers(0, length, end - start - kept))
        found.append(Pass((*positions[:kept], *wrong), positions, kept))
        start += kept
    return found


def error_of(engine: Any, tokens: Sequence[int], truth: Floats, seed: int = 0) -> float:
    """The relative error of the worst token, in passes of 1 to 4 tokens with rejected drafts."""
    return relative_error(feed(engine, tokens, random_passes(len(tokens), seed)), truth)


def write_tiny(model_type: str, folder: Path, *, stacked: bool = False, **changes: Any) -> Path:
    """A checkpoint of a family as the hub has it: bf16, in several files, with a tokenizer.

    Where transformers saves each expert in separate tensors, `stacked` keeps the tensors that it has in memory.
    """
    from tiny import train_tokenizer

    model = tiny_model(model_type, **changes).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB", save_original_format=not stacked)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
