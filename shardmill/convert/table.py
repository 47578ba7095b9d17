"""The host's embedding table in fp16, streamed from the checkpoint as the weights of a program are."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from shardmill.convert import blob, stream
from shardmill.convert.rows import Band
from shardmill.plan import Part

HEADER_ALIGNMENT = 8


def write_table(part: Part, source: Path, file: Path, threads: int) -> None:
    """Writes the tables of an embedding part, each under its path, as a safetensors file that must not exist.

    Raises CheckpointError for a value that fp16 can't hold.
    """
    entries, starts, end = {}, [], 0
    for tensor in part.tensors:
        starts.append(end)
        end += 2 * math.prod(tensor.shape)
        entries[tensor.path] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [starts[-1], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    prefix = len(header).to_bytes(8, "little") + header
    with stream.created(file) as descriptor:
        os.ftruncate(descriptor, len(prefix) + end)
        blob.write_at(descriptor, prefix, 0)
        bands = (Band((tensor,)) for tensor in part.tensors)
        weights = [stream.Weight(band, len(prefix) + at) for band, at in zip(bands, starts, strict=True)]
        stream.stream(descriptor, weights, source, threads)
