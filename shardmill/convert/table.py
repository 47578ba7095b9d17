"""The host's embedding table in fp16 or in int8, streamed from the checkpoint like the weights of a program."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.headers import ITEM_BYTES, header_bytes
from shardmill.convert import blob
from shardmill.convert.stream import RowRange, Weight, created, stream
from shardmill.forms.form import FP16, Shape, form
from shardmill.models.contract import BY_TOKEN
from shardmill.plan import Part

TABLE_DTYPE = "F16"


def write_table(part: Part, source: Path, file: Path, threads: int, name: str = FP16) -> None:
    """Write the tables of an embedding part, each under its path, as a safetensors file that must not exist.

    Args:
        part: the part.
        source: the checkpoint's folder.
        file: where the tables go.
        threads: how many threads round.
        name: the form of the tables of tokens, fp16 or int8; int8 has a scale for each row, under PATH.scale.

    Raises:
        CheckpointError: for a value that fp16 can't hold.
    """
    forms = {tensor.path: name if tensor.path in BY_TOKEN else FP16 for tensor in part.tensors}
    entries, end = dict[str, dict[str, Any]](), 0
    tensors = sorted(_tensors(part, forms), key=lambda row: row[1] != TABLE_DTYPE)  # int8 last: no gap
    for path, dtype, shape in tensors:
        start, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        entries[path] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    prefix = header_bytes(entries)
    with created(file) as descriptor:
        os.ftruncate(descriptor, len(prefix) + end)
        blob.write_at(descriptor, prefix, 0)
        places = {path: len(prefix) + entry["data_offsets"][0] for path, entry in entries.items()}
        weights = [
            Weight(RowRange((t,)), places[t.path], places.get(f"{t.path}.scale"), form(forms[t.path]))
            for t in part.tensors
        ]
        stream(descriptor, weights, source, threads)


def _tensors(part: Part, forms: Mapping[str, str]) -> Iterator[tuple[str, str, Shape]]:
    """Return name, type and shape of every tensor of the file."""
    for tensor in part.tensors:
        if forms[tensor.path] == FP16:
            yield tensor.path, TABLE_DTYPE, tensor.shape
        else:
            yield tensor.path, "I8", tensor.shape
            yield f"{tensor.path}.scale", TABLE_DTYPE, tensor.shape[:1]
