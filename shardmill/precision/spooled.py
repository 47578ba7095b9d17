"""Writes a safetensors file whose tensors come one after the other, so that never more than one is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"}  # in the order in which safetensors sorts them
ALIGNMENT = 8  # of what comes after the header
PIECE = 1 << 24  # bytes


def write_spooled(to: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Callable[[], Mapping[str, str]]) -> None:
    """Writes the file that safetensors' own save_file writes of the same tensors, byte for byte.

    Args:
        to: the file, beside which there must be room for as much again while it is written.
        tensors: by name, in any order, in fp16, int8 or uint8.
        metadata: asked for when there are no more tensors; of one entry, as safetensors keeps no order of several.
    """
    with TemporaryFile(dir=to.parent) as spool, to.open("wb") as file:
        held: dict[str, tuple[Tensor, int]] = {}  # name -> what says its form, its place in the spool
        for name, tensor in tensors:
            held[name] = tensor.to("meta"), spool.tell()
            spool.write(tensor.contiguous().numpy().data)
        kinds = list(DTYPES)
        entries, end = dict[str, Any](__metadata__=dict(metadata())), 0
        for name, (form, _) in sorted(held.items(), key=lambda item: (kinds.index(item[1][0].dtype), item[0])):
            start, end = end, end + form.nbytes
            entries[name] = {"dtype": DTYPES[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in [name for name in entries if name in held]:
            form, place = held[name]
            spool.seek(place)
            for start in range(0, form.nbytes, PIECE):
                file.write(spool.read(min(PIECE, form.nbytes - start)))
