"""Files of arrays: what others write is read, and what is damaged is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from portable_coreml.errors import InputError
from portable_coreml.files.arrays import read_arrays


def test_arrays_are_read_as_their_own_library_writes_them(tmp_path: Path) -> None:
    """Of every type that numpy has, and bf16, which float32 holds exactly."""
    kinds = (
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in (*kinds, torch.bool, torch.bfloat16)}
    tensors["empty"] = torch.zeros(0, 3)
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"made": "here"})
    found = read_arrays(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        assert found[name].dtype == wanted.dtype
        np.testing.assert_array_equal(found[name], wanted)
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    assert read_arrays(tmp_path / "a.npz")["x"].tolist() == [0, 1, 2]


def _file(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        _file([]),
        _file({"x": 1}),
        _file({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
        _file({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(2)),
        _file({"x": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        _file({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, bytes(4)),
    ],
    ids=range(8),
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.safetensors: not a \.safetensors file"):
        read_arrays(tmp_path / "a.safetensors")
