"""What an adapter adds to the projections of a layer, as PyTorch: B (A x), with A and B from a program's inputs.

Shapes: x is [1, channels, T, 1]; rows of A are [1, 1, rows, channels], B transposed is [1, 1, r, channels].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardmill.models.adapters import layer_stacks
from shardmill.models.contract import GraphSpec


class LayerAdapter:
    """The matrices of one layer, see models/adapters.py. x is [1, in, T, 1], and each result is [1, out, T, 1]."""

    def __init__(self, rank: int, slices: Mapping[str, Tensor], gated: bool) -> None:
        """Take the layer's slices apart.

        Args:
            rank: rows of a matrix.
            slices: the slices by the input's name, each [1, 1, rows, width].
            gated: whether the MLP has a gate.
        """
        self.rank, self.wide = rank, 2 if gated else 1
        if "adapter_attn" in slices:
            self.qkv_down, self.o_up = torch.split(slices["adapter_attn"], [3 * rank, rank], dim=2)
            self.q_up, self.o_down = torch.split(slices["adapter_query"], [rank] * 2, dim=2)
            self.k_up, self.v_up = torch.split(slices["adapter_key_value"], [rank] * 2, dim=2)
        if "adapter_mlp" in slices:
            self.wide_down, self.down_up = torch.split(slices["adapter_mlp"], [self.wide * rank, rank], dim=2)
            *self.wide_up, self.down_down = torch.split(slices["adapter_ffn"], [rank] * (self.wide + 1), dim=2)

    def projected(self, x: Tensor) -> list[Tensor]:
        """Return what is added to query, key and value."""
        inner = torch.split(_times(self.qkv_down, x), [self.rank] * 3, dim=2)
        return [_back(up, one) for up, one in zip((self.q_up, self.k_up, self.v_up), inner, strict=True)]

    def attended(self, x: Tensor) -> Tensor:
        """Return what is added to the projection of the heads' output."""
        return _back(self.o_up, _times(self.o_down, x))

    def widened(self, x: Tensor) -> list[Tensor]:
        """Return what is added to gate and up, or to up alone if there is no gate."""
        inner = _times(self.wide_down, x)
        pieces = torch.split(inner, [self.rank] * self.wide, dim=2) if self.wide > 1 else (inner,)
        return [_back(up, one) for up, one in zip(self.wide_up, pieces, strict=True)]

    def narrowed(self, x: Tensor) -> Tensor:
        """Return what is added to the MLP's last projection."""
        return _back(self.down_up, _times(self.down_down, x))


def layer_adapter(spec: GraphSpec, inputs: Mapping[str, Tensor], index: int) -> LayerAdapter | None:
    """Return the adapter of a layer; None if the part takes no adapters, or the layer has nothing to adapt.

    Args:
        spec: the part's.
        inputs: the inputs of the part's module, slices by layer among them.
        index: the layer.
    """
    stacks = layer_stacks(spec.graph, dict(spec.layers)[index]) if spec.calls.adapters else {}
    slices = {name: inputs[f"{name}_{index}"] for name in stacks}
    return LayerAdapter(spec.calls.adapters, slices, spec.graph.gated) if slices else None


def _times(down: Tensor, x: Tensor) -> Tensor:
    """Return A x [1, 1, rows, T] for rows of A [1, 1, rows, in]."""
    return torch.matmul(down, x.reshape(1, 1, down.shape[3], -1))


def _back(up: Tensor, inner: Tensor) -> Tensor:
    """Return B y [1, out, T, 1] for B transposed [1, 1, r, out] and y [1, 1, r, T]."""
    return torch.matmul(up.transpose(-1, -2), inner).reshape(1, up.shape[3], -1, 1)
