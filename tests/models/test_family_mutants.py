"""Mistakes that ports of these families have made: each puts a tiny model further off than any gate allows.

The sound description of the same model stays within the limit (test_families.py), so it is the mistake that shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardmill import plan
from shardmill.checkpoint.headers import TensorInfo, check_tensors
from shardmill.errors import CheckpointError
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models.architecture import LOCAL_ROPE, ROPE, Graph, LayerSpec, ModelDescription
from shardmill.models.contract import RING
from shardmill.models.host import Floats, KVLayout

from . import tiny_families as tiny

LIMIT = THRESHOLDS["program_error"].limit
Mutation = Callable[[ModelDescription], ModelDescription]


def graph(**changes: Any) -> Mutation:
    """Other options of the graph."""
    return lambda model: replace(
        model, architecture=replace(model.architecture, graph=replace(model.architecture.graph, **changes))
    )


def kinds(change: Callable[[LayerSpec], LayerSpec]) -> Mutation:
    """Other layers."""
    return lambda model: replace(
        model, architecture=replace(model.architecture, kinds=tuple(map(change, model.architecture.kinds)))
    )


def window(by: int) -> Mutation:
    """Another window."""

    def changed(model: ModelDescription) -> ModelDescription:
        a = model.architecture
        assert a.window is not None
        return replace(model, architecture=replace(a, window=a.window + by))

    return changed


def sources(suffix: str, **changes: Any) -> Mutation:
    """Constants whose paths end in `suffix`, from elsewhere or changed otherwise."""

    def changed(model: ModelDescription) -> ModelDescription:
        found = {path: source for path, source in model.sources.items() if path.endswith(suffix)}
        assert found
        return replace(model, sources={**model.sources, **{path: replace(s, **changes) for path, s in found.items()}})

    return changed


def swapped(one: str, other: str) -> Mutation:
    """Two constants of every layer, each in the other's place."""

    def changed(model: ModelDescription) -> ModelDescription:
        found = dict(model.sources)
        for path in model.sources:
            if path.endswith(one):
                twin = path.removesuffix(one) + other
                found[path], found[twin] = model.sources[twin], model.sources[path]
        return replace(model, sources=found)

    return changed


def twice(name: str) -> Mutation:
    """A factor of the graph, applied twice."""
    return lambda model: graph(**{name: getattr(model.architecture.graph, name) ** 2})(model)


def only_rope(table: str) -> Mutation:
    """One rotary table for all layers."""
    return kinds(lambda kind: replace(kind, rope=table))


MUTANTS: dict[str, tuple[str, Mutation]] = {
    "qwen3: norm after the rotation": ("qwen3", graph(qk_norm="after")),
    "hunyuan: norm before the rotation": ("hunyuan_v1_dense", graph(qk_norm="before")),
    "gemma2: gain without 1 in a layer": ("gemma2", sources("layers.0.input_layernorm.weight", add=0.0)),
    "gemma2: gain without 1 at the end": ("gemma2", sources("norm.weight", add=0.0)),
    "gemma3: gain without 1 on keys": ("gemma3_text", sources("k_norm.weight", add=0.0)),
    "gemma2: no embedding scale": ("gemma2", sources("embedding", times=1 / 8)),
    "gemma2: scores not capped": ("gemma2", graph(score_cap=0.0)),
    "gemma2: logits not capped": ("gemma2", graph(logit_cap=0.0)),
    "gemma2: attention scale by head_dim": ("gemma2", graph(attention_scale=0.0)),
    "gemma3: attention scale by head_dim": ("gemma3_text", graph(attention_scale=0.0)),
    "granite: attention scale by head_dim": ("granite", graph(attention_scale=0.0)),
    "gemma3: local angles on global layers": ("gemma3_text", only_rope(LOCAL_ROPE)),
    "gemma3: global angles on local layers": ("gemma3_text", only_rope(ROPE)),
    "smollm3: flags inverted": ("smollm3", kinds(lambda k: replace(k, rope=None if k.rope else ROPE))),
    "smollm3: all layers turn": ("smollm3", only_rope(ROPE)),
    "granite: branches scaled twice": ("granite", twice("branch_scale")),
    "granite: branches not scaled": ("granite", graph(branch_scale=1.0)),
    "granite: logits scaled twice": ("granite", twice("logit_scale")),
    "granite: attention scaled twice": ("granite", twice("attention_scale")),
    "granite: embedding scaled twice": ("granite", sources("embedding", times=144.0)),
    "qwen2: no biases": ("qwen2", graph(qkv_bias=False)),
    "qwen2: the key's bias on values": ("qwen2", swapped("k_proj.bias", "v_proj.bias")),
    "llama: no output bias": ("llama", graph(o_bias=False)),
    "llama: no bias in the MLP": ("llama", graph(mlp_bias=False)),
    "llama: gate and up exchanged": ("llama", swapped("gate_proj.weight", "up_proj.weight")),
    "lfm2: taps in reverse": ("lfm2", swapped("tap_0", "tap_2")),
    **{
        f"{name}: window {by:+d}": (name, window(by))
        for name in ("mistral", "qwen3", "gemma2", "gemma3_text")
        for by in (-1, 1)
    },
}


def error(model_type: str, mutation: Mutation = lambda model: model, host: type[KVLayout] = KVLayout) -> float:
    """How far off the tiny model of a family is after a mistake."""
    model, tokens = tiny.tiny_model(model_type), tiny.tiny_text()
    engine = tiny.Blocks(mutation(tiny.described(model)), tiny.tensors_of(model), host=host)
    return tiny.error_of(engine, tokens, tiny.expected(model, tokens))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found_out(name: str) -> None:
    assert error(*MUTANTS[name]) > LIMIT


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_an_epsilon_that_is_not_scaled_with_the_stream_is_found_out(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """ANEMLL leaves it out; it is 64 times too large then."""
    monkeypatch.setattr(Graph, "stream_eps", property(lambda self: self.rms_norm_eps))
    assert error(model_type) > LIMIT


class LastWritten(KVLayout):
    """Keeps the convolution's last inputs in the order of writing, rejected ones included, as a naive port does."""

    written = 0

    def _ring_masks(self, at: NDArray[np.int64]) -> dict[str, Floats]:
        order = np.arange(self.written, self.written + len(at))
        self.written += len(at)
        return super()._ring_masks(order)

    def reset(self) -> None:
        super().reset()
        self.written = 0


def test_a_convolution_that_remembers_rejected_inputs_is_found_out() -> None:
    assert RING > tiny.TEXT // 2  # it goes around
    assert error("lfm2", host=LastWritten) > LIMIT


@pytest.mark.parametrize("model_type", ["gemma2", "hunyuan_v1_dense", "llama", "mistral", "qwen3"])
def test_heads_of_hidden_over_heads_are_refused(model_type: str) -> None:
    """Where the config says head_dim: other shapes than the checkpoint's tensors have."""
    model = tiny.tiny_model(model_type)
    sound = tiny.described(model)
    found = {name: _info(name, tuple(tensor.shape)) for name, tensor in tiny.tensors_of(model).items()}
    g = sound.architecture.graph
    check_tensors(found, plan.tensor_shapes(sound), optional=sound.ignored)
    wrong = graph(head_dim=g.hidden // g.heads)(sound)
    with pytest.raises(CheckpointError, match="k_proj.weight is .* instead of"):
        check_tensors(found, plan.tensor_shapes(wrong), optional=sound.ignored)


def _info(name: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, "model.safetensors", 0, 0, "BF16", shape)
