"""What an encoder could get wrong in its arithmetic is seen: each fault is put in, and the comparison must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import limits
import pytest
import torch
from kit_runner.figures import relative_error

from shardmill.models.architecture import Architecture, EncoderIO, LayerSpec, ModelDescription, TensorSource, blocks
from shardmill.models.blocks import TokenRow
from shardmill.models.experts import transposed
from shardmill.models.shared import Shared

from . import tiny_encoders as tiny
from .tiny_families import limit_of

LEAST = 1e-3  # error of a fault; the limit of the gate is 1e-4
FILTER = "openai_privacy_filter"


def graph(model: ModelDescription, **changes: object) -> ModelDescription:
    """The model with options of its graph changed."""
    a = model.architecture
    return replace(model, architecture=replace(a, graph=replace(a.graph, **changes)))  # type: ignore[arg-type]


def architecture(model: ModelDescription, change: Callable[[Architecture], Architecture]) -> ModelDescription:
    """The model with its architecture changed."""
    return replace(model, architecture=change(model.architecture))


def banded(model: ModelDescription, more: int) -> ModelDescription:
    """The model with a band that is so much wider."""
    return architecture(model, lambda a: replace(a, band=(a.band or 0) + more))


def straight(model: ModelDescription) -> ModelDescription:
    """Without the order of rows that makes neighbours halves."""
    turned = ("self_attn.q_proj.", "self_attn.k_proj.")
    found = {
        path: blocks(sources)[0].tensor for path, sources in model.sources.items() if any(t in path for t in turned)
    }
    return replace(model, sources={**model.sources, **{path: TensorSource(name) for path, name in found.items()}})


def interleaved(model: ModelDescription) -> ModelDescription:
    """Gate and up as every other column, as gpt-oss has them."""
    a = model.architecture
    assert a.graph.experts is not None
    found = dict(model.sources)
    for i in range(a.layers):
        path = f"model.layers.{i}.mlp.experts."
        other = transposed(a.graph.experts, a.graph.hidden, path, interleaved=True)
        found |= {f"layers.{i}.{role}": sources for role, sources in other.items()}
    return replace(model, sources=found)


def experts(model: ModelDescription, **changes: object) -> ModelDescription:
    """The model with options of its experts changed."""
    assert model.architecture.graph.experts is not None
    return graph(model, experts=replace(model.architecture.graph.experts, **changes))  # type: ignore[arg-type]


def kinds(model: ModelDescription, change: Callable[[LayerSpec], LayerSpec]) -> ModelDescription:
    """The model with every layer changed."""
    return architecture(model, lambda a: replace(a, kinds=tuple(map(change, a.kinds))))


def ends(model: ModelDescription, change: Callable[[EncoderIO], EncoderIO]) -> ModelDescription:
    """The model with what is around its layers changed."""
    return architecture(model, lambda a: replace(a, ends=change(a.ends or EncoderIO())))


def unscaled(model: ModelDescription) -> ModelDescription:
    """The model with an embedding table in the scale of the model itself."""
    (table,) = blocks(model.sources["embedding"])
    return replace(model, sources={**model.sources, "embedding": replace(table, times=8 * table.times)})


def gained(model: ModelDescription, role: str) -> ModelDescription:
    """The model without the 1 that is added to gains whose path ends so, or is this."""
    found = {
        path: tuple(replace(source, add=0.0) for source in blocks(sources))
        for path, sources in model.sources.items()
        if path == role or (role != "norm.weight" and path.endswith(role))
    }
    assert found
    return replace(model, sources={**model.sources, **found})


def read(model: ModelDescription, role: str, **changes: object) -> ModelDescription:
    """The model with constants whose path ends so read in another way from their tensors."""
    found = {path: blocks(sources)[0] for path, sources in model.sources.items() if path.endswith(role)}
    assert found
    changed = {path: replace(source, **changes) for path, source in found.items()}  # type: ignore[arg-type]
    return replace(model, sources={**model.sources, **changed})


def exchanged(model: ModelDescription) -> ModelDescription:
    """The model with the two key heads of its sliding layer in each other's place."""
    path = "layers.1.self_attn.k_proj.weight"
    (source,) = blocks(model.sources[path])
    heads = tuple(replace(source, rows=rows, shape=(64, 64)) for rows in ((32, 64, 1), (0, 32, 1)))
    return replace(model, sources={**model.sources, path: heads})


def one_base(a: Architecture) -> Architecture:
    """The architecture with the base of the full layers' rotary table in both of its tables."""
    full, sliding = a.ropes["rope"], a.ropes["rope_local"]
    assert len(full.inv_freq) == 2 * len(sliding.inv_freq)
    return replace(a, ropes={**a.ropes, "rope_local": replace(sliding, inv_freq=full.inv_freq[::2])})


GEMMA2 = "embedding_gemma2_text"
MUTANTS: dict[str, tuple[str, Callable[[ModelDescription], ModelDescription]]] = {
    "a band that leaves out its edge": (
        FILTER,
        lambda m: architecture(m, lambda a: replace(a, band=(a.band or 0) - 1)),
    ),
    "a rotation of halves on rows of neighbours": (FILTER, straight),
    "gate and up interleaved": (FILTER, interleaved),
    "no sinks": (FILTER, lambda m: graph(m, sinks=False)),
    "weights divided by k": (FILTER, lambda m: experts(m, scale=1 / 3)),
    "one expert fewer": (FILTER, lambda m: experts(m, chosen=2)),
    "weights that are not normalised": (FILTER, lambda m: experts(m, normalised=False)),
    "every position seen": (FILTER, lambda m: banded(m, 99)),
    "a wider band": ("modernbert", lambda m: banded(m, 1)),
    "one rotary table": ("modernbert", lambda m: kinds(m, lambda k: replace(k, rope="rope"))),
    "no final norm": ("modernbert", lambda m: ends(m, lambda e: replace(e, final_norm=False))),
    "another activation before the classifier": ("modernbert", lambda m: ends(m, lambda e: replace(e, dense="relu"))),
    "the epsilon of a decoder": ("bert", lambda m: graph(m, rms_norm_eps=1e-6)),
    "norms before branches": ("bert", lambda m: graph(m, outer_norms=False, pre_norms=False, post_norms=True)),
    "a token that sees later tokens": ("qwen3", lambda m: architecture(m, lambda a: replace(a, causal=False))),
    "a window that lacks its edge": ("qwen3", lambda m: banded(m, -1)),
    "a window that is too wide": ("qwen3", lambda m: banded(m, 1)),
    "a last norm that is left out": ("qwen3", lambda m: ends(m, lambda e: replace(e, final_norm=False))),
    "the epsilon of most models": ("qwen3", lambda m: graph(m, rms_norm_eps=1e-6)),
    "half a window, rounded down": ("gemma3_text", lambda m: banded(m, -1)),
    "half a window, with the token itself": ("gemma3_text", lambda m: banded(m, 1)),
    "a token that sees no later token": ("gemma3_text", lambda m: architecture(m, lambda a: replace(a, causal=True))),
    "an embedding on another scale than the stream": ("gemma3_text", unscaled),
    "an epsilon that is not scaled with the stream": ("gemma3_text", lambda m: graph(m, stream_scale=1.0)),
    "gains without 1": ("gemma3_text", lambda m: gained(m, "layernorm.weight")),
    "a last gain without 1": ("gemma3_text", lambda m: gained(m, "norm.weight")),
    "a radius that lacks its edge": (GEMMA2, lambda m: banded(m, -1)),
    "a radius that is too wide": (GEMMA2, lambda m: banded(m, 1)),
    "values that are not normed": (GEMMA2, lambda m: graph(m, value_norm=False)),
    "scores that are divided": (GEMMA2, lambda m: graph(m, attention_scale=0.0)),
    "key heads exchanged": (GEMMA2, exchanged),
    "one base for both sizes of heads": (GEMMA2, lambda m: architecture(m, one_base)),
    "an embedding that is not scaled": (GEMMA2, lambda m: read(m, "embedding", times=1.0)),
    "a stream that no number follows": (GEMMA2, lambda m: graph(m, layer_scale=False)),
    "a row that is divided by the root of 2": (
        GEMMA2,
        lambda m: read(m, "per_layer.projection.weight", times=0.5**0.5),
    ),
    "a projected embedding that is not divided": (GEMMA2, lambda m: graph(m, per_layer_eps=1e-3)),
    "the first layer's row in all layers": (
        GEMMA2,
        lambda m: read(m, "per_layer.model_projection.weight", rows=(0, 16, 1)),
    ),
    "twice the epsilon": (GEMMA2, lambda m: graph(m, rms_norm_eps=2e-3)),
    "gains of 1 + weight": (GEMMA2, lambda m: read(m, "norm.weight", add=1.0)),
    "no norm before the last projection": (GEMMA2, lambda m: ends(m, lambda e: replace(e, final_norm=False))),
    "segments left out": ("bert", lambda m: architecture(m, lambda a: replace(a, positions=0, types=0))),
}


def error(model_type: str, change: Callable[[ModelDescription], ModelDescription]) -> float:
    """The error of the worst token of a changed model, in a bucket that is not filled."""
    model, tokens = tiny.tiny_model(model_type), tiny.tiny_text()
    made = tiny.Blocks(change(tiny.described(model)), model.state_dict())
    return relative_error(made.run(tokens, 64), tiny.expected(model, tokens))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(name: str) -> None:
    model_type, change = MUTANTS[name]
    assert error(model_type, change) > LEAST


def test_a_row_that_is_projected_from_the_stream_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer projects its row from the embedding."""
    real = TokenRow.forward

    def of_the_stream(self: TokenRow, x: torch.Tensor, shared: Shared) -> torch.Tensor:
        shared.embedded = x
        return real(self, x, shared)

    monkeypatch.setattr(TokenRow, "forward", of_the_stream)
    assert error(GEMMA2, lambda model: model) > LEAST


@pytest.mark.parametrize("model_type", tiny.TINY)
def test_without_a_fault_nothing_is(model_type: str) -> None:
    """So that what the mutants show is theirs."""
    torch.manual_seed(0)
    limits.agrees(model_type, error(model_type, lambda model: model), limit_of(tiny.tiny_model(model_type)))
