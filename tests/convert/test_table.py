"""The streamed embedding table is the file that safetensors writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from shardmill import plan
from shardmill.checkpoint.headers import read_tensors
from shardmill.convert import stream
from shardmill.convert.table import write_table
from shardmill.convert.weights import PartWeights
from shardmill.models import phi3

from .small import head_part, write_checkpoint


@pytest.mark.parametrize("rows", [128, 100, 7])
def test_table_is_the_file_that_safetensors_writes(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK", 640)  # ten rows at a time
    source = write_checkpoint(tmp_path / "checkpoint")
    tensor = plan.slice_rows(read_tensors(source)[phi3.EMBEDDING], 0, rows)
    part = plan.Part("embedding", "embedding", 0, rows, 0, 4, head_part(source, 0, 32).graph, (tensor,))
    (values,) = PartWeights(part, source).values()
    save_file({"embedding": values.half()}, tmp_path / "theirs")
    write_table(part, source, tmp_path / "ours", threads=2)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
