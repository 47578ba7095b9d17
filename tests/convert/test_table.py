"""The streamed embedding table is the file that safetensors writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from coremltools.optimize.coreml._quantization_passes import linear_quantize_weights
from models.tiny_families import write_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardmill.convert import stream
from shardmill.convert.table import write_table
from shardmill.convert.weights import PartWeights
from shardmill.models.contract import PER_LAYER
from shardmill.runtime.engine import read_tables
from shardmill.runtime.kv import token_rows

from .small import LAYERS, described, draft, write_checkpoint


@pytest.mark.parametrize("rows", [128, 100, 7])
def test_table_is_the_file_that_safetensors_writes(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK", 640)  # ten rows at a time
    source = write_checkpoint(tmp_path / "checkpoint")
    whole = draft(source, [[0, LAYERS]])["embedding"]
    (tensor,) = whole.tensors
    size = (tensor.end - tensor.start) // tensor.stored[0]  # bytes of a row
    cut = replace(tensor, end=tensor.start + rows * size, stored=(rows, *tensor.stored[1:]))
    part = replace(whole.changed(rows=rows), tensors=(cut,))
    (values,) = PartWeights(part, source).values()
    save_file({"embedding": values.half()}, tmp_path / "theirs")
    write_table(part, source, tmp_path / "ours", threads=2)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_rows_for_a_token_and_a_layer_have_scales_of_their_own(tmp_path: Path) -> None:
    """transformers' table gives a token a row for each layer; each is rounded by its own largest number."""
    source = write_tiny("gemma4_text", tmp_path / "checkpoint")
    config, part = described(source).architecture, draft(source, [[0, 8]])["embedding"]
    write_table(part, source, tmp_path / "table", 2, "int8")
    rows = read_tables(tmp_path / "table")[PER_LAYER]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).model
    tokens = [3, 250, 3]
    expected = model.get_per_layer_inputs(torch.tensor([tokens]))[0].detach()  # [T, layers, P]
    found = np.stack([found[0, :, :, 0].T for found in token_rows(rows, tokens, config.layers).values()], axis=1)
    steps = np.abs(found - expected.numpy()) / (np.abs(expected.numpy()).max(axis=-1, keepdims=True) / 127)
    assert found.shape == (3, 8, 16) and 0.3 < steps.max() < 0.6
    assert np.array_equal(found[0], found[2])


def test_a_table_in_int8_has_coremltools_integers_and_scales(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    part = draft(source, [[0, LAYERS]])["embedding"]
    (values,) = PartWeights(part, source).values()
    write_table(part, source, tmp_path / "ours", 2, "int8")
    half = values.half().numpy()
    made = linear_quantize_weights.blockwise_compress(half, 8, "LINEAR_SYMMETRIC", True, [1, 0])
    found = load_file(tmp_path / "ours")
    assert found.keys() == {"embedding", "embedding.scale"}
    assert np.array_equal(found["embedding"].numpy(), made.data)
    assert np.array_equal(found["embedding.scale"].numpy(), made.scale[:, 0])
    rows = read_tables(tmp_path / "ours")["embedding"][[3, 100]]
    assert np.array_equal(rows, made.data[[3, 100]].astype(np.float32) * made.scale[[3, 100]].astype(np.float32))
    save_file(found, tmp_path / "theirs")
    assert (tmp_path / "theirs").stat().st_size == (tmp_path / "ours").stat().st_size
