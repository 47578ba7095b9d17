"""A checkpoint with rotated weights: the same function, and weights that few bits hold better.

What is rotated stands in rotatable.py, by what in rotation.py. The result is a checkpoint in fp32 like any other, with
an LM head of its own and the original's hashes in rotation.json. It repeats bit for bit on any machine.
Sources: https://arxiv.org/abs/2404.00456 (QuaRot), https://arxiv.org/abs/2405.16406 (SpinQuant).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardmill.checkpoint.expect import check_tensors, check_tied, wrong_dtypes
from shardmill.checkpoint.hashing import hash_file, scan_checkpoint
from shardmill.checkpoint.headers import read_tensors
from shardmill.checkpoint.layout import text_files, weight_files
from shardmill.checkpoint.paths import INDEX_FILE
from shardmill.errors import CheckpointError, GateError
from shardmill.files import read_json, replacing, write_json
from shardmill.gates.parity import relative_error
from shardmill.gates.reference import HEAD_ROWS, Reference, checkpoint_weights
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models.hf_config import load_hf_config
from shardmill.precision.rotatable import HEAD, TABLE, Group, Heads, groups

CONFIG, RECORD = "config.json", "rotation.json"
FP32 = 4  # bytes
TOKENS = 64  # by which the two models are compared


def rotate(source: Path, dest: Path) -> float:
    """Writes the rotated checkpoint to the new folder `dest`, which appears at once or not at all.

    Memory is the embedding table in fp32, and a layer.

    Args:
        source: the checkpoint's folder.
        dest: the new folder.

    Returns:
        How far its logits lie from the original's: the largest error of a token's, relative to them.

    Raises:
        CheckpointError: a model that can't be rotated, a folder in the way, or no room on the disk.
        GateError: the two models are not the same.
    """
    if dest.exists():
        raise CheckpointError(f"{dest}: is there already; remove it or choose another folder")
    tensors, weights = read_tensors(source), checkpoint_weights(source)
    if odd := wrong_dtypes(tensors):
        raise CheckpointError(f"{source}: {odd[0]}; only weights that are not quantised can be rotated")
    heads, head = _heads(source), _head(source)
    try:
        made = groups(tensors, weights, heads, head)
        check_tensors(tensors, _shapes(source), optional=(HEAD,) if head == TABLE else ())
        scan = scan_checkpoint(source, tensors)
        if head == TABLE and HEAD in tensors:
            check_tied(scan.tensors, HEAD, TABLE)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    dest.parent.mkdir(parents=True, exist_ok=True)
    written = {**tensors, HEAD: tensors[head]}  # tied or not, the copy has a head of its own
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
    """What config.json says of attention."""
    config: Any = load_hf_config(source)
    queries = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, getattr(config, "num_key_value_heads", None) or queries, width)


def _head(source: Path) -> str:
    """The tensor that is the LM head."""
    config: Any = load_hf_config(source)
    return TABLE if config.tie_word_embeddings else HEAD


def _shapes(source: Path) -> dict[str, tuple[int, ...]]:
    """What transformers' model of config.json has, by its names, which are the checkpoint's for what can be rotated."""
    return {name: tuple(tensor.shape) for name, tensor in Reference(source, TOKENS).model.state_dict().items()}


def _check_room(shapes: Iterable[tuple[int, ...]], folder: Path) -> None:
    """Refuses to begin what the disk has no room for."""
    needed, free = FP32 * sum(math.prod(shape) for shape in shapes), shutil.disk_usage(folder).free
    if needed > free:
        sizes = f"{needed / 1e9:.2f} GB to write and {free / 1e9:.2f} GB free"
        raise CheckpointError(f"{folder}: disk full, {sizes}; free space or choose another folder")


def _write(made: Iterable[Group], folder: Path) -> None:
    """A weight file for each group, and their index."""
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
    """config.json as the weights now are, the other texts as they were, and what all was made from."""
    names = {file.name for file in source.iterdir() if file.is_file()}
    for name in text_files(names - {CONFIG, INDEX_FILE, RECORD}):
        shutil.copyfile(source / name, folder / name)
    config = read_json(source / CONFIG)
    dtype = "dtype" if "dtype" in config else "torch_dtype"
    write_json(folder / CONFIG, {**config, "tie_word_embeddings": False, dtype: "float32"})
    read = [CONFIG, *weight_files(source, names, str(source))]
    write_json(folder / RECORD, {"schema": 1, "original": {name: hash_file(source / name) for name in read}})


def _logits(source: Path) -> Tensor:
    """What transformers makes in fp32 of tokens from all over the vocabulary, [n, vocab]."""
    weights = checkpoint_weights(source)
    table, head = weights(TABLE), weights(_head(source))
    tokens = [index * len(table) // TOKENS for index in range(TOKENS)]
    reference = Reference(source, TOKENS)
    return reference.run(tokens, lambda ids: table[ids], torch.split(head, HEAD_ROWS), weights)["logits"]
