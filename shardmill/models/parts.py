"""The graphs of whole parts, as PyTorch: layers of models/blocks.py, and what each kind of part puts around them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.blocks import Layer, Weights, create_layer, norm
from shardmill.models.contract import MODEL_NORM, GraphSpec, caches, new_name, new_rows, states
from shardmill.models.interface import LABELS, TOWER
from shardmill.models.low_rank import layer_adapter
from shardmill.models.mixture import RoutedExperts
from shardmill.models.part_kinds import computed, inputs, traced_inputs
from shardmill.models.primitives import (
    ACTIVATIONS,
    LayerNorm,
    RMSNorm,
    cap,
    convolution,
    gelu_erf,
    projection,
    scale,
    unquantized,
)
from shardmill.models.shared import LayerCaches, Shared
from shardmill.models.tower import CONVOLUTIONS, TABLE, Step


def _register_computed(part: nn.Module, spec: GraphSpec) -> None:
    """Give a part the constants that no checkpoint decides, as buffers."""
    for name, values in computed(spec).items():
        part.register_buffer(name, torch.from_numpy(values))


def _registered(part: nn.Module, spec: GraphSpec) -> dict[str, Tensor]:
    """Return a part's constants that no checkpoint decides, by name."""
    return {name: getattr(part, name) for name in computed(spec)}


class LayersPart(nn.Module):
    """Consecutive layers with their states as buffers: the contract's part of kind "layers"."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        self.spec, self.names = spec, list(traced_inputs(spec))
        graph, layers = spec.graph, spec.layers
        self.layers = nn.ModuleDict({str(i): create_layer(graph, kind, i, weights) for i, kind in layers})
        for name, shape in states(spec).items():
            self.register_buffer(name, torch.zeros(shape))
        _register_computed(self, spec)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the last output, what is new to each cache that the host owns, and the taps."""
        spec, arrays = self.spec, dict(zip(self.names[1:], rest, strict=True))
        shared = Shared(spec, arrays, _registered(self, spec))
        by_layer = {i: LayerCaches({"k": arrays[f"k_{i}"], "v": arrays[f"v_{i}"]}, spec.hosted) for i, _ in spec.lent}
        tapped: list[Tensor] = []
        for i, kind in spec.layers:
            tapped += [x] if i in spec.taps else []
            shared.row, shared.adapter = arrays.get(f"p_{i}"), layer_adapter(spec, arrays, i)
            by_layer[i] = by_layer[spec.source(i)] if kind.shares else self._caches(arrays, i)
            x = self.layers[str(i)](x, shared, by_layer[i])
        rows = {new_name(f"{letter}_{i}"): row for i, cached in by_layer.items() for letter, row in cached.new.items()}
        out = (x, *(rows[name] for name in new_rows(spec)), *tapped)
        return out if len(out) > 1 else x

    def _caches(self, arrays: Mapping[str, Tensor], layer: int) -> LayerCaches:
        """Return the caches of a layer of this part."""
        names = [name for name in caches(self.spec) if name.endswith(f"_{layer}")]
        tensors = arrays if self.spec.hosted else dict(self.named_buffers(recurse=False))
        return LayerCaches({name[0]: tensors[name] for name in names}, self.spec.hosted)


class HeadPart(nn.Module):
    """Final norm and some rows of the vocabulary: hidden [1, d, T, 1] -> logits [1, rows, T, 1]."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        self.g = spec.graph
        self.norm = norm(self.g, weights, "norm", self.g.stream_eps)
        self.lm_head = projection(weights["lm_head.weight"], weights.get("lm_head.bias"))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.g.carry:
            hidden = hidden[:, : self.g.hidden]
        logits: Tensor = self.lm_head(self.norm(hidden))
        return cap(scale(logits, self.g.logit_scale), self.g.logit_cap)


class FusePart(nn.Module):
    """A drafter's projection of a token's taps: x [1, n d, T, 1] -> hidden [1, d, T, 1]."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        self.fc = projection(weights["fc.weight"])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.fc(x)
        return hidden


class JoinPart(nn.Module):
    """The stream of Gemma 4's assistant: x [1, 2 m + d, T, 1] -> hidden [1, d, T, 1] (models/assistant.py)."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        g = spec.graph
        self.sizes = [spec.rows, spec.rows, g.hidden]
        self.model_norm = norm(g, weights, MODEL_NORM, g.rms_norm_eps)
        self.norm = norm(g, weights, "norm", g.stream_eps)
        self.post_projection = projection(weights["post_projection.weight"])
        self.pre_projection = projection(weights["pre_projection.weight"])

    def forward(self, x: Tensor) -> Tensor:
        embedding, read, output = torch.split(x, self.sizes, dim=1)
        state = self.model_norm(read) + self.post_projection(self.norm(output))  # the norm of zeros is zero
        hidden: Tensor = self.pre_projection(torch.cat([embedding, state], dim=1))
        return hidden


class MtpPart(nn.Module):
    """What Qwen3.5's MTP layer reads: x [1, 3 d, T, 1] -> hidden [1, d, T, 1] (models/mtp.py)."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        g = spec.graph
        self.hidden = g.hidden
        self.model_norm, self.norm, self.pre_fc_norm_embedding = (
            norm(g, weights, name, g.stream_eps) for name in (MODEL_NORM, "norm", "pre_fc_norm_embedding")
        )
        self.pre_fc_norm_hidden = norm(g, weights, "pre_fc_norm_hidden", g.rms_norm_eps)  # of a norm's output
        self.fc = projection(weights["fc.weight"])

    def forward(self, x: Tensor) -> Tensor:
        embedding, read, output = torch.split(x, self.hidden, dim=1)
        state = self.model_norm(read) + self.norm(output)  # the norm of zeros is zero
        pair = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(state)]
        hidden: Tensor = self.fc(torch.cat(pair, dim=1))
        return hidden


class EncoderPart(nn.Module):
    """Consecutive layers with what comes before the first or after the last: the contract's part of kind "encoder"."""

    embed_norm: nn.Module
    norm: nn.Module
    dense: nn.Module
    dense_norm: nn.Module
    classifier: nn.Module
    projection: nn.Module

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        assert spec.ends is not None
        g, ends = spec.graph, spec.ends
        self.spec, self.ends, self.names = spec, ends, list(inputs(spec))
        norms = {"embed_norm": ends.embed_norm, "norm": ends.final_norm, "dense_norm": ends.dense_norm}
        for name, present in norms.items():
            eps = g.stream_eps if name == "norm" else g.rms_norm_eps
            setattr(self, name, norm(g, weights, name, eps) if present else nn.Identity())
        self.layers = nn.ModuleDict({str(i): Layer(g, kind, i, weights) for i, kind in spec.layers})
        projections = {"dense": bool(ends.dense), "classifier": bool(ends.labels), "projection": bool(ends.project)}
        for name, present in projections.items():
            made = projection(weights[f"{name}.weight"], weights.get(f"{name}.bias")) if present else nn.Identity()
            setattr(self, name, made)
        _register_computed(self, spec)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        shared = Shared(self.spec, dict(zip(self.names[1:], rest, strict=True)), _registered(self, self.spec))
        x = self.embed_norm(x)
        shared.embedded = x if shared.embedded is None else shared.embedded
        for layer in self.layers.values():
            x = layer(x, shared)
        x = self.dense(self.norm(x))
        if self.ends.dense:
            x = ACTIVATIONS[self.ends.dense](x)
        out: Tensor = self.projection(self.classifier(self.dense_norm(x)))
        return out


class TowerPart(nn.Module):
    """What makes rows of the decoder's width of patches or frames: the contract's part of kind "tower"."""

    def __init__(self, spec: GraphSpec, weights: Weights) -> None:
        super().__init__()
        assert spec.tower is not None
        g, self.io = spec.graph, spec.tower
        self.spec, self.names, self.hidden = spec, list(inputs(spec)), g.hidden
        if sound := self.io.convolutions:
            for name in CONVOLUTIONS:
                setattr(self, name, convolution(weights[f"{name}.weight"], (3, 3), weights[f"{name}.bias"], 2, 1))
            self.patch = convolution(weights["patch.weight"], (sound.height, 1))
        else:
            self.patch = projection(weights["patch.weight"], weights.get("patch.bias"))
        if self.io.places:
            self.position_table = unquantized(weights[TABLE])
        self.layers = nn.ModuleDict({str(i): Layer(g, kind, i, weights) for i, kind in spec.layers})
        self.norm = norm(g, weights, "norm", g.rms_norm_eps)
        for step in self.io.connector:
            setattr(self, step.name, self._made(step, weights))

    def _made(self, step: Step, weights: Weights) -> nn.Module:
        weight, bias = weights[f"{step.name}.weight"], weights.get(f"{step.name}.bias")
        if step.rows:
            return projection(weight, bias)
        eps = step.eps or self.spec.graph.rms_norm_eps
        return RMSNorm(weight, eps) if self.spec.graph.norm == "rms" else LayerNorm(weight, bias, eps)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        arrays = dict(zip(self.names[1:], rest, strict=True))
        shared = Shared(self.spec, arrays, {})
        if self.io.convolutions:
            for name in CONVOLUTIONS:
                x = gelu_erf(getattr(self, name)(x))
            x = self.patch(x) + arrays["positions"]  # [chunks, d, 1, tokens of each]
            x = x.transpose(0, 1).reshape(1, self.hidden, -1, 1)
        else:
            x = self.patch(x)
        if self.io.places:
            rows = arrays["positions"].reshape(1, 1, self.io.places, -1)
            x = x + torch.matmul(self.position_table, rows).reshape(1, self.hidden, -1, 1)
        for layer in self.layers.values():
            x = layer(x, shared)
        x = self.norm(x)
        if (n := self.io.merged) > 1:  # the channels of neighbours side by side
            x = x.reshape(1, self.hidden, -1, n).permute(0, 3, 1, 2).reshape(1, n * self.hidden, -1, 1)
        for step in self.io.connector:
            x = getattr(self, step.name)(x)
            x = ACTIVATIONS[step.activation](x) if step.activation else x
        return x


MODULES: Mapping[str, type[nn.Module]] = {  # of each of PART_KINDS
    "layers": LayersPart,
    "experts": RoutedExperts,
    "head": HeadPart,
    LABELS: HeadPart,
    "encoder": EncoderPart,
    "fuse": FusePart,
    "join": JoinPart,
    "mtp": MtpPart,
    TOWER: TowerPart,
}


def build(spec: GraphSpec, weights: Weights) -> nn.Module:
    """Return the module of a part, in inference mode.

    Args:
        spec: the part's.
        weights: in fp32 by the contract's paths.
    """
    return MODULES[spec.kind](spec, weights).eval()
