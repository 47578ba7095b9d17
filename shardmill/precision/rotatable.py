"""What of a checkpoint is rotated: the matrices that read the residual stream, those that write it, and the values.

The model is one whose RMSNorms stand before what they belong to. A rotation leaves the root of the mean square as it
is, and a norm's gains go into the matrices behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardmill.errors import CheckpointError
from shardmill.gates.naming import Weights
from shardmill.gates.reference import HEAD_ROWS
from shardmill.precision.rotation import rotated, rotated_outputs

TABLE, NORM, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "lm_head.bias"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
READERS = {  # a layer's norms, each with the matrices behind it
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
NORM_OF = {matrix: norm for norm, matrices in READERS.items() for matrix in matrices}
VALUES, PACKED, OUTPUT = "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj"
WRITERS = (OUTPUT, "mlp.down_proj")
KEPT = ("self_attn.q_norm", "self_attn.k_norm")  # of queries and keys, which stay as they are

Group = Mapping[str, Callable[[], Tensor]]  # tensors in fp32 by their names, each made when it is called


@dataclass(frozen=True)
class Heads:
    """A layer's attention heads: how many of queries, how many of keys and values, and how wide they are."""

    queries: int
    keys: int
    width: int


def groups(names: Collection[str], weights: Weights, heads: Heads, head: str) -> list[Group]:
    """The rotated model's tensors: the table, each layer, and what stands after the layers.

    Args:
        names: of the checkpoint's tensors.
        weights: these.
        heads: of its layers.
        head: the tensor that is its LM head.

    Raises:
        CheckpointError: a model with other weights than those that are known here.
    """
    layers = _layers(names)
    last: dict[str, Callable[[], Tensor]] = {
        NORM: lambda: _ones(weights(NORM)),
        HEAD: lambda: _reader(weights(head), weights(NORM)),
    }
    if HEAD_BIAS in names:
        last[HEAD_BIAS] = lambda: weights(HEAD_BIAS).float()
    own = [{name: partial(_of_layer, name, role, weights, heads) for name, role in layer.items()} for layer in layers]
    return [{TABLE: lambda: rotated(weights(TABLE))}, *own, last]


def _layers(names: Collection[str]) -> list[dict[str, str]]:
    """For each layer, its tensors' names with what they are called in it."""
    known = {*READERS, *NORM_OF, *WRITERS, *KEPT}
    found: dict[int, dict[str, str]] = {}
    for name in sorted({*names} - {TABLE, NORM, HEAD, HEAD_BIAS}):
        match = LAYER.fullmatch(name)
        if not match or match[2] not in known:
            raise CheckpointError(f"tensor {name} belongs to a model that can't be rotated: see docs/precision.md")
        found.setdefault(int(match[1]), {})[name] = match[2]
    return [found[index] for index in sorted(found)]


def _of_layer(name: str, role: str, weights: Weights, heads: Heads) -> Tensor:
    """One of a layer's tensors."""
    value, is_bias = weights(name), name.endswith("bias")
    if role in READERS:
        return _ones(value)
    if role in KEPT:
        return value.float()
    if role in WRITERS:
        if is_bias:
            return rotated(value[None])[0]
        return rotated_outputs(_with_inputs(value, heads) if role == OUTPUT else value)
    if not is_bias:
        value = _reader(value, weights(name.replace(role, NORM_OF[role])))
    first = {VALUES: 0, PACKED: (heads.queries + heads.keys) * heads.width}.get(role)
    return value.float() if first is None else _with_values(value.float(), first, heads)


def _ones(gains: Tensor) -> Tensor:
    """The gains of a norm whose own have gone into the matrices behind it."""
    return torch.ones(gains.shape)


def _reader(matrix: Tensor, gains: Tensor) -> Tensor:
    """A matrix [r, d] that reads the stream behind a norm with gains [d]."""
    return torch.cat([rotated(rows.double() * gains.double()) for rows in torch.split(matrix, HEAD_ROWS)])


def _with_inputs(matrix: Tensor, heads: Heads) -> Tensor:
    """The output projection [d, queries * width] for values that are rotated within each head."""
    return rotated(matrix.reshape(-1, heads.width)).view(matrix.shape)


def _with_values(projection: Tensor, first: int, heads: Heads) -> Tensor:
    """A projection's weight [r, d] or bias [r], its rows from `first` on rotated within each head."""
    values = projection[first:]
    by_head = values.reshape(heads.keys, heads.width, -1).transpose(1, 2)  # [keys, d, width]
    mixed = rotated(by_head.reshape(-1, heads.width)).view(by_head.shape).transpose(1, 2)
    return torch.cat([projection[:first], mixed.reshape(values.shape)])
