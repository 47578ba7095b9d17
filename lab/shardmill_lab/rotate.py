"""A checkpoint with rotated weights: the same function, and weights that few bits hold better.

Hadamard matrices with random signs rotate the hidden states between layers and the values of each attention head. The
result is a checkpoint in fp32 like any other, with a separate LM head and the original's hashes in rotation.json. It
repeats bit for bit on any machine.
Sources: https://arxiv.org/abs/2404.00456 (QuaRot), https://arxiv.org/abs/2405.16406 (SpinQuant).
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit_runner.figures import relative_error
from safetensors.torch import save_file
from torch import Tensor

from shardmill.checkpoint.hashing import hash_file, scan_checkpoint
from shardmill.checkpoint.headers import check_tensors, check_tied, read_tensors, wrong_dtypes
from shardmill.checkpoint.layout import text_files, weight_files
from shardmill.checkpoint.paths import INDEX_FILE
from shardmill.errors import CheckpointError, GateError
from shardmill.files import read_json, replacing, write_json
from shardmill.gates.naming import Weights
from shardmill.gates.reference import HEAD_ROWS, Reference, checkpoint_weights
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models.hf_config import load_hf_config

ROWS = 4096  # rows that are rotated at a time, in fp64


def rotated(rows: Tensor) -> Tensor:
    """Return rows Q in fp32 [n, d], for rows [n, d] in any float dtype."""
    return torch.cat([_mixed(block.double()).float() for block in torch.split(rows, ROWS)])


def rotated_outputs(matrix: Tensor) -> Tensor:
    """Return Q^T matrix in fp32 [d, c], for a matrix [d, c] whose outputs are to be rotated."""
    return rotated(matrix.T).T.contiguous()


def _mixed(x: Tensor) -> Tensor:
    """Return x Q in fp64, [n, d]."""
    n, d = x.shape
    block = d & -d  # the largest power of two that divides d
    x = _hadamard(x * _signs(d, 1), block)
    if block == d:
        return x
    dealt = x.view(n, d // block, block).transpose(1, 2).reshape(n, d)
    return _hadamard(dealt * _signs(d, 2), block)


def _hadamard(x: Tensor, block: int) -> Tensor:
    """Return each block of channels times the orthogonal Hadamard matrix of its width, [n, d]."""
    n, d = x.shape
    half = 1
    while half < block:
        a, b = x.view(n, d // (2 * half), 2, half).unbind(dim=2)
        x = torch.stack([a + b, a - b], dim=2).view(n, d)
        half *= 2
    return x * float(block**-0.5)


def _signs(d: int, which: int) -> Tensor:
    """Return d pseudo-random signs, the same in every run."""
    drawn = hashlib.shake_256(f"rotation {which}".encode()).digest(-(-d // 8))
    return torch.from_numpy(np.unpackbits(np.frombuffer(drawn, np.uint8))[:d].astype(np.float64) * 2 - 1)


TABLE, NORM, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "lm_head.bias"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
READERS = {  # a layer's norms, each with the matrices behind it
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
NORM_OF = {matrix: norm for norm, matrices in READERS.items() for matrix in matrices}
VALUES, PACKED, OUTPUT = "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj"
WRITERS = (OUTPUT, "mlp.down_proj")
KEPT = ("self_attn.q_norm", "self_attn.k_norm")  # norms of queries and keys, which stay as they are

Group = Mapping[str, Callable[[], Tensor]]  # tensors in fp32 by their names, each made when it is called


@dataclass(frozen=True)
class Heads:
    """A layer's attention heads: how many of queries, how many of keys and values, and how wide they are."""

    queries: int
    keys: int
    width: int


def _rotation_groups(names: Collection[str], weights: Weights, heads: Heads, head: str) -> list[Group]:
    """Return the rotated model's tensors in groups: the table, each layer, and the tensors after the layers.

    Args:
        names: the names of the checkpoint's tensors.
        weights: the tensors by name.
        heads: the attention heads of a layer.
        head: the name of the LM head's tensor.

    Raises:
        CheckpointError: the model has weights that are not known here.
    """
    layers = _layers(names)
    last: dict[str, Callable[[], Tensor]] = {
        NORM: lambda: _ones(weights(NORM)),
        HEAD: lambda: _reader(weights(head), weights(NORM)),
    }
    if HEAD_BIAS in names:
        last[HEAD_BIAS] = lambda: weights(HEAD_BIAS).float()
    by_layer = [{n: partial(_of_layer, n, role, weights, heads) for n, role in layer.items()} for layer in layers]
    return [{TABLE: lambda: rotated(weights(TABLE))}, *by_layer, last]


def _layers(names: Collection[str]) -> list[dict[str, str]]:
    """Return for each layer the names of its tensors, with their names inside the layer."""
    known = {*READERS, *NORM_OF, *WRITERS, *KEPT}
    by_layer: dict[int, dict[str, str]] = {}
    for name in sorted({*names} - {TABLE, NORM, HEAD, HEAD_BIAS}):
        match = LAYER.fullmatch(name)
        if not match or match[2] not in known:
            raise CheckpointError(f"tensor {name} belongs to a model that can't be rotated: see docs/precision.md")
        by_layer.setdefault(int(match[1]), {})[name] = match[2]
    return [by_layer[index] for index in sorted(by_layer)]


def _of_layer(name: str, role: str, weights: Weights, heads: Heads) -> Tensor:
    """Return one of a layer's tensors."""
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
    """Return the gains of a norm after its own gains have moved into the matrices behind it."""
    return torch.ones(gains.shape)


def _reader(matrix: Tensor, gains: Tensor) -> Tensor:
    """Return a matrix [r, d] that reads the stream behind a norm with gains [d]."""
    return torch.cat([rotated(rows.double() * gains.double()) for rows in torch.split(matrix, HEAD_ROWS)])


def _with_inputs(matrix: Tensor, heads: Heads) -> Tensor:
    """Return the output projection [d, queries * width] for values that are rotated within each head."""
    return rotated(matrix.reshape(-1, heads.width)).view(matrix.shape)


def _with_values(projection: Tensor, first: int, heads: Heads) -> Tensor:
    """Return a projection's weight [r, d] or bias [r], its rows from `first` on rotated within each head."""
    values = projection[first:]
    by_head = values.reshape(heads.keys, heads.width, -1).transpose(1, 2)  # [keys, d, width]
    mixed = rotated(by_head.reshape(-1, heads.width)).view(by_head.shape).transpose(1, 2)
    return torch.cat([projection[:first], mixed.reshape(values.shape)])


CONFIG, RECORD = "config.json", "rotation.json"
FP32 = 4  # bytes
TOKENS = 64  # how many tokens compare the two models


def rotate_checkpoint(source: Path, dest: Path) -> float:
    """Write the rotated checkpoint to the new folder `dest`, which appears at once or not at all.

    It needs memory for the embedding table in fp32 and a layer.

    Args:
        source: the checkpoint's folder.
        dest: the new folder.

    Returns:
        The largest relative error of a token's logits against the original's logits.

    Raises:
        CheckpointError: the model can't be rotated, the folder exists already, or the disk is full.
        GateError: the two models' logits differ too much.
    """
    if dest.exists():
        raise CheckpointError(f"{dest}: is there already; remove it or choose another folder")
    tensors, weights = read_tensors(source), checkpoint_weights(source)
    if odd := wrong_dtypes(tensors):
        raise CheckpointError(f"{source}: {odd[0]}; only weights that are not quantised can be rotated")
    heads, head = _heads(source), _head(source)
    try:
        made = _rotation_groups(tensors, weights, heads, head)
        check_tensors(tensors, _shapes(source), optional=(HEAD,) if head == TABLE else ())
        scan = scan_checkpoint(source, tensors)
        if head == TABLE and HEAD in tensors:
            check_tied(scan.tensors, HEAD, TABLE)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    dest.parent.mkdir(parents=True, exist_ok=True)
    written = {**tensors, HEAD: tensors[head]}  # the copy has a separate head even if the original's is tied
    _check_room([tensor.shape for tensor in written.values()], dest.parent)
    with replacing(dest) as folder:
        folder.mkdir()
        _write(made, folder)
        _write_texts(source, folder)
        difference = relative_error(_logits(folder), _logits(source))
        if not THRESHOLDS["program_error"].holds(difference):
            raise GateError(f"{source}: rotated, its logits are {difference:.1e} off; it can't be rotated exactly")
    return difference


def _heads(source: Path) -> Heads:
    """Return the attention heads in config.json."""
    config: Any = load_hf_config(source)
    queries = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, getattr(config, "num_key_value_heads", None) or queries, width)


def _head(source: Path) -> str:
    """Return the name of the LM head's tensor."""
    config: Any = load_hf_config(source)
    return TABLE if config.tie_word_embeddings else HEAD


def _shapes(source: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of transformers' parameters by name; a checkpoint that can be rotated has the same."""
    return {name: tuple(tensor.shape) for name, tensor in Reference(source, TOKENS).model.state_dict().items()}


def _check_room(shapes: Iterable[tuple[int, ...]], folder: Path) -> None:
    """Raise CheckpointError if the disk has no room for the tensors."""
    needed, free = FP32 * sum(math.prod(shape) for shape in shapes), shutil.disk_usage(folder).free
    if needed > free:
        sizes = f"{needed / 1e9:.2f} GB to write and {free / 1e9:.2f} GB free"
        raise CheckpointError(f"{folder}: disk full, {sizes}; free space or choose another folder")


def _write(made: Iterable[Group], folder: Path) -> None:
    """Write a weight file for each group, and the index of the files."""
    placed: dict[str, str] = {}
    total = 0
    for i, group in enumerate(made):
        file = f"model-{i:05d}.safetensors"
        tensors = {name: make().contiguous() for name, make in group.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
        total += sum(value.nbytes for value in tensors.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": placed})


def _write_texts(source: Path, folder: Path) -> None:
    """Write config.json for the rotated weights, the other texts as they were, and the record of their source."""
    names = {file.name for file in source.iterdir() if file.is_file()}
    for name in text_files(names - {CONFIG, INDEX_FILE, RECORD}):
        shutil.copyfile(source / name, folder / name)
    config = read_json(source / CONFIG)
    dtype = "dtype" if "dtype" in config else "torch_dtype"
    write_json(folder / CONFIG, {**config, "tie_word_embeddings": False, dtype: "float32"})
    read = [CONFIG, *weight_files(source, names, str(source))]
    write_json(folder / RECORD, {"schema": 1, "original": {name: hash_file(source / name) for name in read}})


def _logits(source: Path) -> Tensor:
    """Return the fp32 logits of transformers for tokens from all over the vocabulary, [n, vocab]."""
    weights = checkpoint_weights(source)
    table, head = weights(TABLE), weights(_head(source))
    tokens = [index * len(table) // TOKENS for index in range(TOKENS)]
    reference = Reference(source, TOKENS)
    return reference.run(tokens, lambda ids: table[ids], torch.split(head, HEAD_ROWS), weights)["logits"]
