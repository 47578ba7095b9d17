"""The programs of a model as PyTorch modules, built from a Graph and the kinds of its layers.

Submodules carry the paths that models/contract.py gives the weights, so that the programs' constants do too.

Shapes: x, y, z and whatever a branch adds to the stream are [1, d, T, 1], with d the hidden width and T the tokens of
the pass; x has more channels where it comes with a token's embedding or a router's state. gate and up are
[1, ffn, T, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import XIELU, Graph, LayerSpec
from shardmill.models.attention import Attention, ConvolvedAttention, SharingAttention
from shardmill.models.delta_net import GatedDeltaNet
from shardmill.models.low_rank import LayerAdapter
from shardmill.models.mamba import MambaMixer
from shardmill.models.mixers import MIXERS
from shardmill.models.mixture import ExpertChoice, Mixture, Router
from shardmill.models.primitives import (
    ACTIVATIONS,
    LayerNorm,
    RMSNorm,
    XIELUActivation,
    add_channels,
    projection,
    read_ring,
    scale,
    sigmoid_by_tanh,
    vector,
)
from shardmill.models.rg_lru import RgLruMixer
from shardmill.models.shared import LayerCaches, Shared

Weights = Mapping[str, Tensor]


class ShortConv(nn.Module):
    """A gated causal convolution of a few taps over a ring of its inputs (transformers, models/lfm2)."""

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__()
        self.hidden, self.taps = g.hidden, g.conv_taps
        self.in_proj = projection(weights[f"{path}in_proj.weight"])
        self.out_proj = projection(weights[f"{path}out_proj.weight"])
        for j in range(self.taps):
            tap = weights[f"{path}tap_{j}"].reshape(1, -1, 1, 1)
            setattr(self, f"tap_{j}", nn.Parameter(tap, requires_grad=False))

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches) -> Tensor:
        b, c, x = torch.split(self.in_proj(x), self.hidden, dim=1)  # each [1, d, T, 1]
        u = b * x
        ring = caches.put("c", u.reshape(1, 1, self.hidden, -1), shared.ring_write, shared.ring_keep)
        # The last tap is this token's; tap L - 1 - j reads j tokens back.
        y = getattr(self, f"tap_{self.taps - 1}") * u
        for j, read in enumerate(shared.ring_read, start=1):
            y = y + getattr(self, f"tap_{self.taps - 1 - j}") * read_ring(ring, read, self.hidden)
        out: Tensor = self.out_proj(c * y)
        return out


class GatedMLP(nn.Module):
    """down(activation(gate) * up), gate and up in one projection or in two."""

    gate_up_proj: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        self.g = g
        for name in ("gate_up_proj",) if g.fused else ("gate_proj", "up_proj"):
            setattr(self, name, projection(weights[f"{path}{name}.weight"], weights.get(f"{path}{name}.bias")))
        self.down_proj = projection(weights[f"{path}down_proj.weight"], weights.get(f"{path}down_proj.bias"))

    def forward(self, x: Tensor, adapter: LayerAdapter | None = None) -> Tensor:
        if self.g.fused:
            gate, up = torch.split(self.gate_up_proj(x), self.g.ffn, dim=1)  # each [1, ffn, T, 1]
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        if adapter:
            gate, up = (one + added for one, added in zip((gate, up), adapter.widened(x), strict=True))
        y = scale(ACTIVATIONS[self.g.activation](gate) * up, self.g.output_scale)
        down: Tensor = self.down_proj(y)
        return down + adapter.narrowed(y) if adapter else down


class PlainMLP(nn.Module):
    """down(activation(up))."""

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        if g.activation == XIELU:
            alphas = (weights[f"{path}act_fn.{name}"] for name in ("alpha_p", "alpha_n"))
            self.act_fn: Callable[[Tensor], Tensor] = XIELUActivation(*alphas)
        else:
            self.act_fn = ACTIVATIONS[g.activation]
        self.up_proj = projection(weights[f"{path}up_proj.weight"], weights.get(f"{path}up_proj.bias"))
        self.down_proj = projection(weights[f"{path}down_proj.weight"], weights.get(f"{path}down_proj.bias"))

    def forward(self, x: Tensor, adapter: LayerAdapter | None = None) -> Tensor:
        up = self.up_proj(x)
        y = self.act_fn(up + adapter.widened(x)[0] if adapter else up)
        down: Tensor = self.down_proj(y)
        return down + adapter.narrowed(y) if adapter else down


def norm(g: Graph, weights: Weights, path: str, eps: float) -> nn.Module:
    """Return the norm of a constant's path, of the kind that the family has."""
    if g.norm == "layer":
        return LayerNorm(weights[f"{path}.weight"], weights.get(f"{path}.bias"), eps)
    return RMSNorm(weights[f"{path}.weight"], eps)


class ResidualScale(nn.Module):
    """(branch + bias) * scale + (stream + bias) * scale, each [1, d, T, 1] (transformers, models/zaya)."""

    hidden_states_bias: Tensor
    hidden_states_scale: Tensor
    residual_bias: Tensor
    residual_scale: Tensor

    def __init__(self, weights: Weights, path: str) -> None:
        super().__init__()
        for name in ("hidden_states_bias", "residual_bias"):
            setattr(self, name, vector(weights[f"{path}{name}"]))
        for name in ("hidden_states_scale", "residual_scale"):
            setattr(self, name, nn.Parameter(weights[f"{path}{name}"].reshape(1, -1, 1, 1), requires_grad=False))

    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        branch = add_channels(branch, self.hidden_states_bias) * self.hidden_states_scale
        return branch + add_channels(stream, self.residual_bias) * self.residual_scale


class TokenRow(nn.Module):
    """What a token's row for a layer adds to the stream (transformers, models/gemma4 and models/embedding_gemma2).

    norm(projection(activation(gate(x)) * (projection_norm(model_projection(embedded)) + row))). The model divides the
    sum in the last factor by the root of 2; here the epsilon of the norm that follows is doubled instead. Without a
    second table there is no `row`, and nothing is divided.
    """

    def __init__(self, g: Graph, weights: Weights, path: str) -> None:
        super().__init__()
        self.activation, self.table = g.activation, g.per_layer_table
        self.model_projection, self.gate, self.projection = (
            projection(weights[f"{path}{name}.weight"]) for name in ("model_projection", "gate", "projection")
        )
        self.projection_norm = RMSNorm(weights[f"{path}projection_norm.weight"], g.per_layer_eps)
        self.norm = norm(g, weights, f"{path}norm", (2 if self.table else 1) * g.rms_norm_eps)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        row = self.projection_norm(self.model_projection(shared.embedded))
        row = row + shared.row if self.table else row
        out: Tensor = self.norm(self.projection(ACTIVATIONS[self.activation](self.gate(x)) * row))
        return out


MODULES: Mapping[str, Callable[[Graph, LayerSpec, Weights, str], nn.Module]] = {
    "attention": lambda g, kind, *of: (SharingAttention if kind.shares else Attention)(g, kind, *of),
    "cca": ConvolvedAttention,
    "conv": ShortConv,
    "delta": GatedDeltaNet,
    "mamba": MambaMixer,
    "rg_lru": RgLruMixer,
}


def _add_mixer(layer: nn.Module, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
    """Give a layer, whose weights begin with `path`, its mixer."""
    name = MIXERS[kind.mixer].path
    setattr(layer, name, MODULES[kind.mixer](g, kind, weights, f"{path}{name}."))


class SingleLayer(nn.Module):
    """A layer of one branch, a mixer or a feed-forward block (transformers, models/nemotron_h)."""

    def __init__(self, g: Graph, kind: LayerSpec, index: int, weights: Weights) -> None:
        super().__init__()
        path, self.g, self.kind = f"layers.{index}.", g.of(kind), kind
        if kind.mixer:
            self.input_layernorm = norm(g, weights, path + "input_layernorm", g.stream_eps)
            _add_mixer(self, self.g, kind, weights, path)
        else:
            self.post_attention_layernorm = norm(g, weights, path + "post_attention_layernorm", g.stream_eps)
            self.mlp = (GatedMLP if g.gated else PlainMLP)(self.g, weights, path + "mlp.")

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches | None = None) -> Tensor:
        if not self.kind.mixer:
            return x + scale(self.mlp(self.post_attention_layernorm(x), shared.adapter), self.g.branch_scale)
        mixer = getattr(self, MIXERS[self.kind.mixer].path)
        return x + scale(mixer(self.input_layernorm(x), shared, caches), self.g.branch_scale)


class Layer(nn.Module):
    """A mixer and a feed-forward block, each a branch of the residual stream, with the norms that the family has."""

    def __init__(self, g: Graph, kind: LayerSpec, index: int, weights: Weights) -> None:
        super().__init__()
        path, g = f"layers.{index}.", g.of(kind)
        self.g, self.kind = g, kind
        self.routed = kind.ffn == "experts" and g.experts is not None and g.experts.routed
        self.input_layernorm: nn.Module = nn.Identity()
        if g.pre_norms and kind.normed and not g.outer_norms:
            self.input_layernorm = norm(g, weights, path + "input_layernorm", g.stream_eps)
        if kind.paired:
            self.hidden_norm = norm(g, weights, path + "hidden_norm", g.stream_eps)
        _add_mixer(self, g, kind, weights, path)
        eps = g.rms_norm_eps if g.post_norms else g.stream_eps
        if not g.parallel:
            self.post_attention_layernorm = norm(g, weights, path + "post_attention_layernorm", eps)
        plain = GatedMLP if g.gated else PlainMLP
        if kind.ffn == "experts":
            self.mlp: nn.Module = (ExpertChoice if self.routed else Mixture)(g, kind, weights, path + "mlp.")
        else:
            self.mlp = plain(g, weights, path + "mlp.")
        self.beside = kind.ffn == "experts" and g.experts is not None and g.experts.beside
        if self.beside:
            self.shared_mlp = plain(g, weights, path + "shared_mlp.")
            gated = f"{path}shared_mlp_gate.weight" in weights
            self.shared_mlp_gate = Router(weights, path + "shared_mlp_gate.") if gated else None
        if g.post_norms:
            if g.pre_norms:
                self.pre_feedforward_layernorm = norm(g, weights, path + "pre_feedforward_layernorm", g.stream_eps)
            self.post_feedforward_layernorm = norm(g, weights, path + "post_feedforward_layernorm", g.rms_norm_eps)
        if g.per_layer:
            self.per_layer = TokenRow(g, weights, path + "per_layer.")
        if g.layer_scale:
            self.layer_scale = nn.Parameter(weights[path + "layer_scale"].reshape(1, -1, 1, 1), requires_grad=False)
        if g.outer_norms:
            self.post_feedforward_layernorm = norm(g, weights, path + "post_feedforward_layernorm", g.stream_eps)
        if g.residual_scales:
            self.post_attention_residual_scale = ResidualScale(weights, path + "post_attention_residual_scale.")
            self.post_mlp_residual_scale = ResidualScale(weights, path + "post_mlp_residual_scale.")

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches | None = None) -> Tensor:
        mixer = getattr(self, MIXERS[self.kind.mixer].path)
        if self.g.residual_scales:
            return self.scaled(x, mixer, shared, caches)
        if self.g.outer_norms:
            x = self.post_attention_layernorm(x + mixer(x, shared, caches))
            out: Tensor = self.post_feedforward_layernorm(x + self.feed_forward(x, shared))
            return out
        if self.g.post_norms:
            return self.between(x, mixer, shared, caches)
        if self.g.parallel:
            y = self.input_layernorm(x)
            return x + scale(mixer(y, shared, caches) + self.feed_forward(y, shared), self.g.branch_scale)
        if self.kind.paired:
            embedding, x = torch.split(x, self.g.hidden, dim=1)  # each [1, d, T, 1]
            y = self.hidden_norm(x)
            z = torch.cat([self.input_layernorm(embedding), y], dim=1)
            x = scale(y, self.g.stream_scale) if self.kind.norm_before_residual else x
        else:
            z = self.input_layernorm(x)
        x = x + scale(mixer(z, shared, caches), self.g.branch_scale)
        y = self.post_attention_layernorm(x)
        if self.routed:
            x = x + scale(self.aside(y), self.g.branch_scale) if self.beside else x
            return torch.cat([x, y, self.mlp(y, shared.order)[0]], dim=1)
        x = x + scale(self.feed_forward(y, shared), self.g.branch_scale)
        return x

    def feed_forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Return the MLP or the experts, or the sum of both."""
        out: Tensor = self.mlp(x, shared.order)[0] if self.kind.ffn == "experts" else self.mlp(x, shared.adapter)
        return out + self.aside(x) if self.beside else out

    def aside(self, x: Tensor) -> Tensor:
        """Return the output of the MLP beside the experts, multiplied by its gate [1, 1, T, 1] if it has one."""
        out: Tensor = self.shared_mlp(x)
        return out if self.shared_mlp_gate is None else out * sigmoid_by_tanh(self.shared_mlp_gate(x))

    def between(self, x: Tensor, mixer: nn.Module, shared: Shared, caches: LayerCaches | None) -> Tensor:
        """Return the layer with norms on its branches' outputs, and before the branches where the family has such."""
        y = self.input_layernorm(x) if self.g.pre_norms else x
        x = x + self.post_attention_layernorm(mixer(y, shared, caches))
        y = self.pre_feedforward_layernorm(x) if self.g.pre_norms else x
        x = x + self.post_feedforward_layernorm(self.feed_forward(y, shared))
        if self.g.per_layer:
            x = x + self.per_layer(x, shared)
        return x * self.layer_scale if self.g.layer_scale else x

    def scaled(self, x: Tensor, mixer: nn.Module, shared: Shared, caches: LayerCaches | None) -> Tensor:
        """Return the layer with scaled branches and stream, and its router's state after the stream's channels."""
        x, before = torch.split(x, [self.g.hidden, self.g.carry], dim=1)
        x = self.post_attention_residual_scale(mixer(self.input_layernorm(x), shared, caches), x)
        z = self.post_attention_layernorm(x)
        y, state = self.mlp(z, shared.order, before)
        if self.routed:  # y are the experts' weights, and the branch holds only what is added to it
            return torch.cat([self.post_mlp_residual_scale(z * 0, x), state, z, y], dim=1)
        return torch.cat([self.post_mlp_residual_scale(y, x), state], dim=1)


def create_layer(g: Graph, kind: LayerSpec, index: int, weights: Weights) -> nn.Module:
    """Return a layer of a kind."""
    return (Layer if kind.mixer and kind.ffn else SingleLayer)(g, kind, index, weights)
