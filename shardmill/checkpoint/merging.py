"""Merges a LoRA adapter into a checkpoint's weights, as PEFT's `merge_and_unload` does: W becomes W + scaling * B A.

Only weights of layers are changed. The sum is computed in fp32 and rounded once, to the number format of the weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shardmill.checkpoint.headers import TensorInfo
from shardmill.checkpoint.peft import NUMBERS, LoraHeader, check_targets
from shardmill.errors import CheckpointError
from shardmill.printable import printable

# Where transformers and checkpoints have the layers of a decoder: in a model that is more, the names may differ.
DECODERS = ("model.language_model.", "language_model.model.", "model.", "backbone.")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
LAYER = re.compile(r"(^|\.)layers\.\d+\.")
# Begins the names of the decoder's own layers, and of no layer of another tower or an MTP head.
DECODER_LAYER = re.compile(rf"({'|'.join(map(re.escape, DECODERS))})?layers\.\d+\.")
ROWS = 256  # of a matrix at a time


def merged_places(lora: LoraHeader, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the place of the weight of each module that an adapter changes.

    Args:
        lora: the adapter.
        tensors: the checkpoint's tensors by name.

    Raises:
        CheckpointError: the checkpoint lacks a weight, or the adapter does not fit.
    """
    places: dict[str, TensorInfo] = {}
    for module, sides in lora.tensors.items():
        inner = next((module.removeprefix(one) for one in DECODERS if module.startswith(one)), "")
        names = {f"{module}.weight", *(f"{prefix}{inner}.weight" for prefix in DECODERS if inner)} & tensors.keys()
        if len(names) != 1 or not LAYER.search(module):
            raise CheckpointError(f"{lora.folder}: changes {printable(module)}, which is no weight of a layer to merge")
        info = tensors[names.pop()]
        shape = (sides["B"].shape[0], sides["A"].shape[1])
        if info.shape != shape or info.dtype not in NUMBERS:
            base = f"the checkpoint's is {info.dtype} {list(info.shape)}"
            raise CheckpointError(f"{lora.folder}: {printable(module)} is for a weight of {list(shape)}; {base}")
        places[module] = info
    known = {info.name: module for module, info in places.items()}
    layers = (name for name in tensors if DECODER_LAYER.match(name) and "expert" not in name)
    adaptable = [name for name in layers if name.removesuffix(".weight").endswith(PROJECTIONS)]
    check_targets(lora, [known.get(name, name.removesuffix(".weight")) for name in adaptable])
    return places


def merge(lora: LoraHeader, places: Mapping[str, TensorInfo], folder: Path) -> None:
    """Add an adapter to the weights in a folder's files, which must be copies.

    Args:
        lora: the adapter.
        places: the places of the weights, from `merged_places`.
        folder: the checkpoint's folder.

    Raises:
        CheckpointError: a number of the adapter or of a merged weight is not finite.
    """
    import torch  # slow to import, and most checkpoints have nothing merged

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for module, info in places.items():
        matrices = lora.read(module)
        a, b = torch.from_numpy(matrices.a), torch.from_numpy(matrices.b)
        row = (info.end - info.start) // info.shape[0]
        with (folder / info.file).open("r+b") as file:
            for first in range(0, info.shape[0], ROWS):
                file.seek(info.start + first * row)
                data = bytearray(file.read(min(ROWS, info.shape[0] - first) * row))
                weight = torch.frombuffer(data, dtype=kinds[info.dtype]).reshape(-1, info.shape[1])
                weight += (b[first : first + ROWS] @ a) * matrices.scaling
                if not torch.isfinite(weight).all():
                    raise CheckpointError(
                        f"{lora.folder}: {printable(module)}: {info.dtype} can't hold a merged weight"
                    )
                file.seek(info.start + first * row)
                file.write(data)
