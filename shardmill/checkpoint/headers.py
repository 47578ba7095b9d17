"""Reads safetensors headers and indices: the file and the bytes of each tensor, without loading any weight.

All data is checked before use: lengths against the file, ranges against each other and against
dtype x shape, names against the index, paths against the folder. A failed check raises a CheckpointError that
names the file or tensor.
Format: https://github.com/huggingface/safetensors#format (8-byte little-endian header length, JSON, data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmill.checkpoint.paths import (
    INDEX_FILE,
    SINGLE_FILE,
    check_name,
    checked_file,
    describe_missing_weights,
    opened,
)
from shardmill.errors import CheckpointError
from shardmill.files import json_object, parse_json
from shardmill.printable import printable

# The hub's own limit (huggingface_hub.constants.SAFETENSORS_MAX_HEADER_LENGTH). Real headers stay under 3 MB
# and real indices under 10 MB; parsing takes some ten times the text in memory.
MAX_HEADER_BYTES = 25_000_000
MAX_RANK = 8
HEAD, TABLE_ENDS, TABLE = "lm_head.weight", "embed_tokens.weight", "model.embed_tokens.weight"
ALIGNMENT = 8  # of the tensors' bytes in files that we write

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place: bytes [start, end) of `file` (a path relative to the checkpoint folder)."""

    name: str
    file: str
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """Return the beginning of a safetensors file with these entries; the tensors' bytes follow it.

    `entries` is the content of the format's JSON header.
    """
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a checkpoint folder, sorted by name, from `model.safetensors` or from the index.

    Looks for the two names in the same order as transformers.
    Raises CheckpointError if files, headers or index are damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; check the checkpoint's path")
    if (folder / SINGLE_FILE).exists():
        tensors = {info.name: info for info in read_header(folder, SINGLE_FILE)}
    elif (folder / INDEX_FILE).exists():
        tensors = _read_indexed(folder)
    else:
        names = [entry.name for entry in folder.iterdir()]
        raise CheckpointError(describe_missing_weights(str(folder), names))
    return dict(sorted(_with_table(folder, tensors).items()))


def _with_table(folder: Path, tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Return the tensors with a tied LM head under the embedding table's name, too, if the head alone is stored.

    transformers ties the two from either name.
    """
    if HEAD not in tensors or any(name.endswith(TABLE_ENDS) for name in tensors):
        return tensors
    tied = json_object(folder / "config.json").get("tie_word_embeddings") is True
    return {**tensors, TABLE: replace(tensors[HEAD], name=TABLE)} if tied else tensors


def read_index(folder: Path) -> dict[str, str]:
    """Return the index's weight map, tensor name -> file name; every file name is checked to stay in the folder."""
    path = checked_file(folder, INDEX_FILE)
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise damaged(path, f"index of more than {MAX_HEADER_BYTES} bytes")
    with opened(path) as stream:
        weight_map = _parse_json(stream.read(), path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise damaged(path, "no 'weight_map' of tensor names to file names")
    for file in sorted(set(weight_map.values())):
        check_name(file, str(path))
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: lists {file!r}; only .safetensors files are read")
    return weight_map


def _read_indexed(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors that the index' files hold.

    As for transformers, the index says which files there are, and the files say which tensors they hold: some indices
    list tensors that were left out, or leave out some that no model needs. Whoever needs a tensor misses it by name.
    """
    weight_map = read_index(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        for info in read_header(folder, file):
            listed = weight_map.get(info.name, file)
            if listed != file or info.name in tensors:
                what = f"tensor {printable(info.name)} belongs to {listed} according to {INDEX_FILE}"
                raise damaged(folder / file, what)
            tensors[info.name] = info
    return tensors


def read_header(folder: Path, file: str) -> list[TensorInfo]:
    """Return the tensors of one safetensors file in the order of their bytes; reads nothing but the header."""
    path = checked_file(folder, file)
    size = path.stat().st_size
    with opened(path) as stream:
        length = _header_length(stream.read(8), size, path)
        header = _parse_json(stream.read(length), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, "__metadata__ is not a map of strings")
    infos = [_tensor_info(name, entry, file, 8 + length, path) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.start, info.end))
    _check_cover(infos, 8 + length, size, path)
    return infos


def _header_length(prefix: bytes, size: int, path: Path) -> int:
    if prefix == b"version ":
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its clone")
    if len(prefix) < 8:
        raise damaged(path, f"truncated, {size} bytes are no safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise damaged(path, f"header of {length} bytes, over the limit of {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise damaged(path, f"truncated, header of {length} bytes in a file of {size}")
    return length


def _parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        document = parse_json(raw.decode("utf-8"), unique=True)
    except ValueError as error:
        raise damaged(path, f"not valid JSON ({printable(str(error))})") from error
    if not isinstance(document, dict):
        raise damaged(path, "its JSON is not an object")
    return document


def _tensor_info(name: str, entry: Any, file: str, data_start: int, path: Path) -> TensorInfo:
    tensor = f"tensor {printable(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"{tensor} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: {tensor} has dtype {printable(str(dtype))}; use BF16, F16 or F32")
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise damaged(path, f"{tensor}: shape {printable(str(shape))} is no list of at most {MAX_RANK} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(path, f"{tensor}: data_offsets {printable(str(offsets))} are not [begin, end]")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise damaged(path, f"{tensor}: {end - begin} bytes do not hold {dtype} of shape {shape}")
    return TensorInfo(name, file, data_start + begin, data_start + end, dtype, tuple(shape))


def _are_sizes(values: Any) -> bool:
    # bool is an int to Python. No file has a size past 2**63, and such sizes would only make the products large.
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_cover(infos: list[TensorInfo], data_start: int, size: int, path: Path) -> None:
    """Check that the tensors fill the file's data exactly, as the format demands: no overlap, hole or remainder."""
    at = data_start
    for info in infos:
        if info.start < at:
            raise damaged(path, f"tensor {printable(info.name)} overlaps the one before it")
        if info.start > at:
            raise damaged(path, f"unused bytes before tensor {printable(info.name)}")
        if info.end > size:
            raise damaged(path, f"truncated, tensor {printable(info.name)} ends at byte {info.end} of {size}")
        at = info.end
    if at != size:
        raise damaged(path, f"{size - at} bytes after the last tensor")


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a file of a checkpoint that is damaged."""
    return CheckpointError(f"{path}: {what}; fetch the checkpoint again")


WEIGHT_DTYPES = ("BF16", "F16", "F32")
SHOWN = 3
FAULT_LENGTH = 200  # of a name with two shapes


def check_tensors(
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = (),
) -> None:
    """Raise one CheckpointError that names the first tensors missing, extra, misshapen or of a wrong dtype.

    `optional` tensors may be missing (buffers, an untied copy of a tied head). If they are present and also expected,
    their shape must be right. Weights must be BF16, F16 or F32.
    """
    present = {name: info for name, info in tensors.items() if name in expected}
    shapes = [
        f"{name} is {list(info.shape)} instead of {list(expected[name])}"
        for name, info in sorted(present.items())
        if info.shape != tuple(expected[name])
    ]
    faults = [
        _count("missing", sorted(set(expected) - set(tensors) - set(optional))),
        _count("extra", sorted(set(tensors) - set(expected) - set(optional))),
        _count("misshapen", shapes),
        _count(f"not {', '.join(WEIGHT_DTYPES[:-1])} or {WEIGHT_DTYPES[-1]}", wrong_dtypes(present)),
    ]
    if any(faults):
        raise CheckpointError(
            f"tensors are not those that config.json describes: {'; '.join(filter(None, faults))}; "
            "check that both come from the same revision"
        )


def check_tied(hashes: Mapping[str, str], head: str, table: str) -> None:
    """Raise CheckpointError if the LM head is not the embedding table, though config.json ties them.

    Args:
        hashes: the sha256 of each tensor, by name.
        head: the name of the LM head.
        table: the name of the embedding table.
    """
    if hashes[head] != hashes[table]:
        raise CheckpointError(
            f"tensor {head} is not the embedding table, though config.json ties them; transformers then computes with "
            'both: write "tie_word_embeddings": false there, or take the tensor out'
        )


def wrong_dtypes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the tensors in a dtype that no weight may have, each as "NAME is DTYPE"."""
    return [f"{name} is {info.dtype}" for name, info in sorted(tensors.items()) if info.dtype not in WEIGHT_DTYPES]


def _count(fault: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(printable(name, FAULT_LENGTH) for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{len(names)} {fault} ({shown})"
