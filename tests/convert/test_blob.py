"""Weight files are those of coremltools' own writer."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from coremltools.libmilstoragepython import _BlobStorageWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.convert import blob

NAMES = {
    blob.FP16: "fp16",
    blob.UINT8: "uint8",
    blob.INT8: "int8",
    blob.INT4: "int4",
    blob.UINT4: "uint4",
    blob.UINT6: "uint6",
}


def arrays(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    """Numbers that the types hold, and of signed types negative ones."""
    random, found = np.random.default_rng(0), []
    for kind, count in sizes:
        bits, signed = blob.BITS[kind], kind in (blob.INT8, blob.INT4)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
        dtype = np.uint16 if kind == blob.FP16 else np.int8 if signed else np.uint8
        found.append(random.integers(low, high, count).astype(dtype))
    return found


def write_ours(path: Path, kinds: list[int], contents: list[np.ndarray]) -> list[int]:
    blobs = blob.place_blobs((kind, len(a)) for kind, a in zip(kinds, contents, strict=True))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    blob.write_records(file, blobs)
    for where, content in reversed(list(zip(blobs, contents, strict=True))):
        bits = blob.BITS[where.kind]
        made = content if where.kind == blob.FP16 else blob.packed(content, bits)
        blob.write_at(file, made.data, where.data)
    os.close(file)
    return [b.offset for b in blobs]


def write_theirs(path: Path, kinds: list[int], contents: list[np.ndarray]) -> list[int]:
    writer = _BlobStorageWriter(str(path))
    return [getattr(writer, f"write_{NAMES[kind]}_data")(a) for kind, a in zip(kinds, contents, strict=True)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.integers(1, 200)), min_size=1, max_size=6))
def test_files_and_offsets_are_coremltools(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("blob")
    contents, kinds = arrays(sizes), [kind for kind, _ in sizes]
    ours = write_ours(folder / "ours", kinds, contents)
    theirs = write_theirs(folder / "theirs", kinds, contents)
    assert ours == theirs
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:3], offset))
    file = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    blob.write_at(file, b"0123456789", 5)
    os.close(file)
    assert (tmp_path / "f").read_bytes() == bytes(5) + b"0123456789"
