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

FIRST_BYTES = {blob.FP16: np.uint16, blob.INT8: np.int8}


def arrays(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(1, 100, count).astype(FIRST_BYTES[kind]) for kind, count in sizes]


def write_ours(path: Path, kinds: list[int], contents: list[np.ndarray]) -> list[int]:
    blobs = blob.lay_out((kind, a.nbytes) for kind, a in zip(kinds, contents, strict=True))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    blob.write_records(file, blobs)
    for where, content in reversed(list(zip(blobs, contents, strict=True))):
        blob.write_at(file, content.data, where.data)
    os.close(file)
    return [b.offset for b in blobs]


def write_theirs(path: Path, contents: list[np.ndarray]) -> list[int]:
    writer = _BlobStorageWriter(str(path))
    return [writer.write_int8_data(a) if a.dtype == np.int8 else writer.write_fp16_data(a) for a in contents]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([blob.FP16, blob.INT8]), st.integers(1, 200)), min_size=1, max_size=6))
def test_files_and_offsets_are_coremltools(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("blob")
    contents = arrays(sizes)
    ours = write_ours(folder / "ours", [kind for kind, _ in sizes], contents)
    theirs = write_theirs(folder / "theirs", contents)
    assert ours == theirs
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:3], offset))
    file = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    blob.write_at(file, b"0123456789", 5)
    os.close(file)
    assert (tmp_path / "f").read_bytes() == bytes(5) + b"0123456789"
