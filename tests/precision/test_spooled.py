"""Files of codes are written a tensor at a time, and are those that safetensors itself writes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardmill.precision import part_codes
from shardmill.precision.part_codes import write_spooled

TENSORS = {
    "layers.1.b.int4.codes": torch.arange(-7, 8, dtype=torch.int8).reshape(5, 3),  # an odd number of bytes
    "layers.1.b.int4.scale": torch.linspace(0, 1, 5).half(),
    "layers.1.b.palette4.codes": torch.arange(15, dtype=torch.uint8).reshape(5, 3),
    "layers.1.b.palette4.lut": torch.linspace(-1, 1, 16).half().reshape(1, 16),
    "layers.0.a.int4.codes": torch.arange(64, dtype=torch.int8).reshape(8, 8).T,  # not contiguous
    "layers.0.a.int4.scale": torch.ones(8).half(),
    "empty": torch.zeros(0, 4).half(),
}


@pytest.mark.parametrize("piece", [1, 7, 1 << 24])
def test_it_is_what_safetensors_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(part_codes, "PIECE", piece)
    errors = json.dumps({"layers.0.a": {"int4": 0.25}, "é": {}}, sort_keys=True)
    write_spooled(tmp_path / "ours", TENSORS.items(), lambda: {"errors": errors})
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs", {"errors": errors})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_no_tensor_is_kept(tmp_path: Path) -> None:
    """Whatever a layer's codes take, a part of many layers takes no more. What is said of all is asked for last."""
    made: list[weakref.ref[Tensor]] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for index in range(5):
            assert sum(each() is not None for each in made) <= 1  # the last one
            tensor = torch.full((16, 16), index, dtype=torch.int8)
            made.append(weakref.ref(tensor))
            yield str(index), tensor
            del tensor

    write_spooled(tmp_path / "file", tensors(), lambda: {"made": str(len(made))})
    assert b'"made":"5"' in (tmp_path / "file").read_bytes()
