"""Mistakes that ports of these families have made: each puts a tiny model further off than any gate allows.

The sound description of the same model stays within the limit (test_families.py), so it is the mistake that shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmill import plan
from shardmill.checkpoint.headers import TensorInfo, check_tensors
from shardmill.errors import CheckpointError
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models import blocks as graph_blocks
from shardmill.models.architecture import LOCAL_ROPE, ROPE, Graph, LayerSpec, ModelDescription, TensorSource, blocks
from shardmill.models.attention import Attention
from shardmill.models.blocks import Layer, TokenRow
from shardmill.models.caches import RING
from shardmill.models.contract import GraphSpec
from shardmill.runtime.kv import Floats, KVLayout

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


def in_checkpoint_order(suffix: str) -> Mutation:
    """Rows of query and key as the checkpoint has them, so that halves turn where neighbours should."""

    def changed(model: ModelDescription) -> ModelDescription:
        paths = [p for p, source in model.sources.items() if p.endswith(suffix) and isinstance(source, tuple)]
        assert paths
        plain = {path: TensorSource(blocks(model.sources[path])[0].tensor) for path in paths}
        return replace(model, sources={**model.sources, **plain})

    return changed


def rope_scale(table: str, scale: float) -> Mutation:
    """Another attention factor of a rotary table."""

    def changed(model: ModelDescription) -> ModelDescription:
        a = model.architecture
        assert a.ropes[table].scale != scale
        return replace(model, architecture=replace(a, ropes={**a.ropes, table: replace(a.ropes[table], scale=scale)}))

    return changed


def partial_rope(width: int, turning: int) -> Mutation:
    """Rotate full layers by frequencies of `turning` dimensions, the first of `width`."""

    def changed(model: ModelDescription) -> ModelDescription:
        a = model.architecture
        inv_freq = (*(1e6 ** (-2 * i / turning) for i in range(turning // 2)), *[0.0] * ((width - turning) // 2))
        ropes = {**a.ropes, ROPE: replace(a.ropes[ROPE], inv_freq=inv_freq)}
        moved = kinds(lambda kind: replace(kind, rope_dim=width) if kind.rope == ROPE else kind)(model)
        return replace(moved, architecture=replace(moved.architecture, ropes=ropes))

    return changed


def in_turn(model: ModelDescription) -> ModelDescription:
    """The second branch reads what the first one has added to, by the same norm."""
    first = {path: source for path, source in model.sources.items() if ".input_layernorm." in path}
    second = {path.replace("input_", "post_attention_"): source for path, source in first.items()}
    return graph(parallel=False)(replace(model, sources={**model.sources, **second}))


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
    "gemma4: values not normed": ("gemma4_text", graph(value_norm=False)),
    "gemma4: scores by head_dim": ("gemma4_text", graph(attention_scale=0.0)),
    "gemma4: gains of 1 + weight": ("gemma4_text", sources("norm.weight", add=1.0)),
    "gemma4: logits not capped": ("gemma4_text", graph(logit_cap=0.0)),
    "gemma4: embedding not scaled": ("gemma4_text", sources("embedding", times=1.0)),
    "gemma4: rows for layers not scaled": ("gemma4_text", sources("per_layer", times=1.0)),
    "gemma4: the first layer's projection in all": (
        "gemma4_text",
        sources("per_layer.model_projection.weight", rows=(0, 16, 1)),
    ),
    "gemma4: projected embedding not divided": ("gemma4_text", graph(per_layer_eps=1e-3)),
    "gemma4: no number after a layer": ("gemma4_text", graph(layer_scale=False)),
    "gemma4: a contiguous quarter turns": ("gemma4_text", partial_rope(16, 16)),
    "gemma4: the quarter's own frequencies": ("gemma4_text", partial_rope(64, 16)),
    **{
        f"{name}: halves turn": (name, in_checkpoint_order("_proj.weight"))
        for name in ("cohere2", "ernie4_5", "glm4", "helium")
    },
    "glm4: halves of the biases turn": ("glm4", in_checkpoint_order("_proj.bias")),
    "glm4: gate and up exchanged": ("glm4", swapped("gate_proj.weight", "up_proj.weight")),
    "glm4: norms by their names": (
        "glm4",
        swapped("post_attention_layernorm.weight", "pre_feedforward_layernorm.weight"),
    ),
    "granite 4: gate and up exchanged": ("granitemoehybrid", swapped("gate_proj.weight", "up_proj.weight")),
    "granite 4: attention scale by head_dim": ("granitemoehybrid", graph(attention_scale=0.0)),
    "granite 4: branches not scaled": ("granitemoehybrid", graph(branch_scale=1.0)),
    "exaone4: full layers turn": ("exaone4", only_rope(ROPE)),
    "cohere2: full layers turn": ("cohere2", only_rope(ROPE)),
    "cohere2: logits not scaled": ("cohere2", graph(logit_scale=1.0)),
    "cohere2: branches in turn": ("cohere2", in_turn),
    "cohere2: RMSNorm": ("cohere2", graph(norm="rms")),
    "olmo3: YaRN on sliding layers": ("olmo3", only_rope(ROPE)),
    "olmo3: no YaRN on full layers": ("olmo3", only_rope(LOCAL_ROPE)),
    "olmo3: no attention factor": ("olmo3", rope_scale(ROPE, 1.0)),
    "nemotron: gain without 1 in layers": ("nemotron", sources("layernorm.weight", add=0.0)),
    "nemotron: gain without 1 at the end": ("nemotron", sources("norm.weight", add=0.0)),
    "nemotron: ReLU not squared": ("nemotron", graph(activation="relu")),
    "nemotron_h: ReLU not squared": ("nemotron_h", graph(activation="relu")),
    "nemotron_h: gain of 1 + weight": ("nemotron_h", sources("layernorm.weight", add=1.0)),
    "nemotron_h: scores not divided": ("nemotron_h", graph(attention_scale=1.0)),
    "nemotron_h: gate and x exchanged": ("nemotron_h", sources("in_proj_z.weight", rows=(128, 256, 1))),
    "apertus: no beta": ("apertus", sources("alpha_n", add=0.0)),
    "apertus: beta in both numbers": ("apertus", sources("alpha_p", add=0.5)),
    "apertus: no softplus": ("apertus", sources("alpha_p", softplus=False)),
    "apertus: the two numbers exchanged": ("apertus", swapped("alpha_p", "alpha_n")),
    **{
        f"{name}: another epsilon": (name, graph(rms_norm_eps=1e-5))
        for name in ("cohere2", "nemotron", "nemotron_h", "stablelm")
    },
    **{
        f"{name}: window {by:+d}": (name, window(by))
        for name in ("cohere2", "exaone4", "gemma2", "gemma3_text", "gemma4_text", "mistral", "olmo3", "qwen3")
        for by in (-1, 1)
    },
}


def error(
    model_type: str,
    mutation: Mutation = lambda model: model,
    host: type[KVLayout] = KVLayout,
    before: int = 0,
    **changes: Any,
) -> float:
    """How far off the tiny model of a family is after a mistake, perhaps after another text of `before` tokens."""
    model, tokens = tiny.tiny_model(model_type, **changes), tiny.tiny_text()
    engine = tiny.Blocks(mutation(tiny.described(model)), tiny.tensors_of(model), host=host)
    if before:
        tiny.error_of(engine, tiny.tiny_text(before), tiny.expected(model, tiny.tiny_text(before)))
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


def patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Another function or method in the place of one, which `change` gets."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def first_source(_: Any) -> Any:
    """A layer that shares reads the first cache of its kind, not the last."""

    def source(self: GraphSpec, index: int) -> int:
        kinds = dict(self.layers)
        alike = replace(kinds[index], shares=False, wide=1)
        return next(i for i, kind in self.layers if kind == alike) if kinds[index].shares else index

    return source


def of_the_stream(real: Any) -> Any:
    """What is projected and added to a token's row is the stream."""

    def forward(self: TokenRow, x: Tensor, shared: Any) -> Any:
        shared.embedded = x
        return real(self, x, shared)

    return forward


def behind_a_norm(real: Any) -> Any:
    """The gate of a token's row reads a normed stream."""

    def forward(self: TokenRow, x: Tensor, shared: Any) -> Any:
        return real(self, x * torch.rsqrt((x * x).mean(dim=1, keepdim=True)), shared)

    return forward


def scaled_before(_: Any) -> Any:
    """The stream is multiplied by the layer's number before the token's row is added."""

    def between(self: Layer, x: Tensor, mixer: Any, shared: Any, caches: Any) -> Tensor:
        x = x + self.post_attention_layernorm(mixer(self.input_layernorm(x), shared, caches))
        y = self.feed_forward(self.pre_feedforward_layernorm(x), shared)
        x = (x + self.post_feedforward_layernorm(y)) * self.layer_scale
        return x + self.per_layer(x, shared)

    return between


def half_the_epsilon(real: Any) -> Any:
    """The root of 2 is lost that the sum of row and projection is divided by."""
    return lambda g, weights, path, eps: real(g, weights, path, eps / 2 if path.endswith("per_layer.norm") else eps)


def from_the_key(real: Any) -> Any:
    """Values are made of the normed and turned key."""

    def separate(self: Attention, x: Tensor, shared: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = real(self, x, shared)
        return q, k, self.v_norm(k.transpose(2, 3)).transpose(2, 3) if self.kind.key_is_value else v

    return separate


GEMMA4 = {
    "the first cache": ("gemma4_text", patched(GraphSpec, "source", first_source)),
    "the stream's projection": ("gemma4_text", patched(TokenRow, "forward", of_the_stream)),
    "a norm before the gate": ("gemma4_text", patched(TokenRow, "forward", behind_a_norm)),
    "the number before the row": ("gemma4_text", patched(Layer, "between", scaled_before)),
    "no root of 2": ("gemma4_text", patched(graph_blocks, "norm", half_the_epsilon)),
    "values of the turned key": ("gemma4_unified_text", patched(Attention, "separate", from_the_key)),
}


@pytest.mark.parametrize("name", GEMMA4)
def test_a_mistake_in_gemma_4_s_blocks_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, patch = GEMMA4[name]
    patch(monkeypatch)
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
