"""The host's embedding table in fp16, streamed from the checkpoint as the weights of a program are."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from shardmill.convert import blob, stream
from shardmill.plan import Part

HEADER_ALIGNMENT = 8


def write_table(part: Part, source: Path, file: Path, threads: int) -> None:
    """Writes the table of an embedding part as a safetensors file of one tensor, `embedding`, that must not exist.

    Raises CheckpointError for a value that fp16 can't hold.
    """
    (tensor,) = part.tensors
    size = 2 * math.prod(tensor.shape)
    entry = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [0, size]}
    header = json.dumps({"embedding": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    prefix = len(header).to_bytes(8, "little") + header
    with stream.created(file) as descriptor:
        os.ftruncate(descriptor, len(prefix) + size)
        blob.write_at(descriptor, prefix, 0)
        stream.stream(descriptor, [stream.Weight((tensor,), len(prefix))], source, threads)
