"""Gemma 4's assistant by transformers, and the cases of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from shardmill.checkpoint.headers import read_tensors
from shardmill.convert.weights import read_info
from shardmill.gates.case import Case, cache_of, compared, rows_of
from shardmill.gates.reference import Reference, ReferenceDrafter, Steps, checkpoint_weights
from shardmill.gates.replacements import Unnormed, replaced
from shardmill.gates.stored import StoredWeights
from shardmill.models.eagle3 import FOLDER
from shardmill.models.interface import ASSISTANT
from shardmill.plan import Part

if TYPE_CHECKING:
    from shardmill.gates.naming import Weights

SLIDING = "sliding_attention"


def _modes(self: Any) -> list[str | None]:
    """Return what each layer of a Gemma 4 does with a cache that layers share, for a transformers config.

    transformers 5.23.0 raises if all layers share, as an assistant's do. If none does, it stores no cache for an
    assistant, though its comment says that the last layer of each type does.
    """
    first = self.num_hidden_layers - (self.num_kv_shared_layers or 0)
    modes = [None] * first + ["reuse"] * (self.num_hidden_layers - first)
    for name in set(self.layer_types[:first]):
        modes[max(i for i in range(first) if self.layer_types[i] == name)] = "store"
    return modes


@contextmanager
def buildable() -> Iterator[None]:
    """Let transformers build assistants, and models that store caches for an assistant, within the context."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig

    with (
        mock.patch.object(Gemma4TextConfig, "kv_sharing_modes", property(_modes)),
        mock.patch.object(Gemma4UnifiedTextConfig, "kv_sharing_modes", property(_modes)),
    ):
        yield


def _load_assistant(folder: Path) -> Any:
    """Return transformers' model of an assistant's checkpoint, in fp32."""
    import transformers

    tensors = read_tensors(folder)
    with buildable():
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = type(config).__name__.replace("Config", "ForCausalLM")
        model = getattr(transformers, kind)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name in tensors and weight.is_floating_point():
                weight.copy_(read_info(tensors[name], folder).float())
    return model.eval().requires_grad_(False)


@torch.no_grad()
def assistant_case(
    part: Part, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    """Return the case of a part of an assistant, for every token of the text.

    The layers see the positions up to a token's own, as a model's do: which ones the host shows is not the program's.

    Args:
        part: the part.
        plan: plan.json's content.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d].
        source: the model's checkpoint, with the assistant's in a folder inside it.
        stored: the package's weights.
    """
    exact, packaged = (_load_assistant(source / FOLDER) for _ in range(2))
    _hold(packaged, stored)
    with buildable():
        reference = Reference(source, plan["context"])
    hidden, original = known["hidden"], checkpoint_weights(source, plan["prefix"])
    read = reference.normed(hidden[-1], original)
    x = exact.pre_projection(torch.cat([hidden[0], read], dim=-1))
    lent: list[int] = plan["drafter"]["lent"]
    caches = _caches(reference, hidden, lent, original)
    lenders = dict(zip(caches, lent, strict=True))  # by type
    rows = {
        f"{letter}_{layer}": rows_of(each)
        for name, layer in lenders.items()
        for letter, each in zip("kv", caches[name], strict=True)
    }
    state = _layers(exact, x, caches)
    # A draft's first step and its further steps, in turn: the host gives zeros for what the step lacks.
    first = torch.arange(len(x))[:, None] % 2 == 0
    fed_back = torch.where(first, 0.0, state)
    pieces = torch.cat([hidden[0], torch.where(first, hidden[-1], 0.0), fed_back], dim=-1)

    def joined(model: Any, rows: Mapping[str, Tensor]) -> Tensor:
        width = hidden.shape[-1]
        embedded, read, output = torch.split(rows["x"], [width, width, state.shape[-1]], dim=-1)
        normed = reference.normed(read, stored if model is packaged else original)
        further = model.post_projection(model.model.norm(output))  # the norm of zeros is zero
        projected: Tensor = model.pre_projection(torch.cat([embedded, normed + further], dim=-1))
        return projected

    def through_layers(model: Any, rows: Mapping[str, Tensor]) -> Tensor:
        named = {
            name: (cache_of(rows[f"k_{layer}"], caches[name][0]), cache_of(rows[f"v_{layer}"], caches[name][1]))
            for name, layer in lenders.items()
        }
        return _layers(model, rows["x"], named)

    cases: dict[str, tuple[dict[str, Tensor], Callable[[Any, Mapping[str, Tensor]], Tensor]]] = {
        "join": ({"x": pieces}, joined),
        "layers": ({"x": x, **rows}, through_layers),
        "head": ({"hidden": state}, lambda model, rows: model.lm_head(model.model.norm(rows["hidden"]))),
    }
    return compared(*cases[part.kind], packaged, exact)


def reference_assistant(
    plan: Mapping[str, Any],
    source: Path,
    all_stored: Iterable[StoredWeights],
    embed: Callable[[Sequence[int]], Tensor],
    weights: Weights,
) -> ReferenceDrafter:
    """Return an assistant that drafts; every step of a draft sees the model's positions before the newest token's.

    Args:
        plan: plan.json's content.
        source: the model's checkpoint, with the assistant's in a folder inside it.
        all_stored: the weights of the assistant's packages.
        embed: returns the model's embeddings of tokens, [n, d].
        weights: the weights of the model's packages.
    """
    model = _load_assistant(source / FOLDER)
    for stored in all_stored:
        _hold(model, stored)
    with buildable():
        reference = Reference(source, plan["context"])

    def begin(hidden: Tensor) -> Callable[[Sequence[int]], Steps]:
        normed = reference.normed(hidden[-1], weights)
        caches = _caches(reference, hidden, plan["drafter"]["lent"], weights)

        def steps(context: Sequence[int]) -> Steps:
            at, token = len(context) - 1, context[-1]
            seen = {name: (keys[:, :, :at], values[:, :, :at]) for name, (keys, values) in caches.items()}
            read = normed[at - 1 : at]
            while True:
                x = model.pre_projection(torch.cat([embed([token]), read], dim=-1))
                state = model.model.norm(_layers(model, x, seen, at))
                token = yield model.lm_head(state)[0]
                read = model.post_projection(state)

        return steps

    return ReferenceDrafter(ASSISTANT, range(plan["drafter"]["vocab"]), [model, reference.model], begin)


@torch.no_grad()
def _hold(model: Any, stored: StoredWeights) -> None:
    """Give an assistant the weights that a package contains."""
    parameters = model.state_dict()
    for name in {tensor.source.tensor for tensor in stored.part.tensors if tensor.source.tensor.startswith(FOLDER)}:
        parameters[name.removeprefix(FOLDER)].copy_(stored(name))


def _caches(
    reference: Reference, hidden: Tensor, lent: Sequence[int], weights: Weights
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the keys and values that the model lends an assistant, by type, each [1, heads, n, head_dim]."""
    return {name: pair for i in lent for name, pair in reference.shared_caches(hidden[i], i, weights).items()}


def _layers(model: Any, x: Tensor, caches: Mapping[str, tuple[Tensor, Tensor]], first: int = 0) -> Tensor:
    """Return the outputs [n, d] of an assistant's layers at positions `first` and on, given the model's caches by type.

    A position sees itself and earlier ones, as far as the caches go.
    """
    config, places = model.model.config, torch.arange(first, first + len(x))
    later = torch.arange(next(iter(caches.values()))[0].shape[2]) - places[:, None]  # key's position less the query's
    hidden = {"full_attention": later > 0, SLIDING: (later > 0) | (later <= -config.sliding_window)}
    masks = {name: torch.zeros(later.shape).masked_fill(each, -torch.inf)[None, None] for name, each in hidden.items()}
    with replaced(model.model, "norm", Unnormed()):
        outputs: Tensor = model.model(
            inputs_embeds=x[None],
            attention_mask=masks,
            position_ids=places[None],
            shared_kv_states=dict(caches),
            use_cache=False,
            output_hidden_states=True,  # otherwise it cuts off the rows of its second table, which it lacks
        ).last_hidden_state[0]
    return outputs
