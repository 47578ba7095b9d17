"""A part's weights are the checkpoint's, in fp32, and fp16 can hold them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from shardmill.convert.weights import PartWeights
from shardmill.errors import CheckpointError

PATH = "layers.0.self_attn.o_proj.weight"
NAME = f"model.{PATH}"


def together(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder, by safetensors' own reader."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def test_they_are_what_safetensors_reads(built: tiny.Build) -> None:
    expected = together(built.source)
    weights = PartWeights(built.parts["layers_00_02"], built.source)
    assert {f"model.{path}" for path in weights} == {n for n in expected if ".layers.0." in n or ".layers.1." in n}
    for path, values in weights.items():
        assert values.dtype == torch.float32
        assert torch.equal(values, expected[f"model.{path}"].float())


def test_rows_of_a_table_are_the_head_s(built: tiny.Build) -> None:
    table = together(built.source)["model.embed_tokens.weight"].float()
    for j, name in enumerate(("head_0", "head_1")):
        weights = PartWeights(built.parts[name], built.source)
        assert list(weights) == ["norm.weight", "lm_head.weight"]
        assert torch.equal(weights["lm_head.weight"], table[128 * j : 128 * (j + 1)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_read_too(tmp_path: Path, dtype: torch.dtype) -> None:
    weights, expected = one_layer(tmp_path, dtype, 1.5)
    assert torch.equal(weights[PATH], expected.float())


def test_a_weight_over_fp16_s_range_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{NAME}: holds values over 65504"):
        one_layer(tmp_path, torch.float32, -65600.0)[0][PATH]
    assert one_layer(tmp_path / "edge", torch.float32, -65504.0)[0][PATH].min() == -65504


def one_layer(folder: Path, dtype: torch.dtype, value: float) -> tuple[PartWeights, torch.Tensor]:
    """A checkpoint of one layer in `dtype` with one chosen value, and the tensor that holds it."""
    checkpoint = tiny.write_checkpoint(folder / "checkpoint", layers=1)
    tensors = {name: values.to(dtype) for name, values in together(checkpoint).items()}
    tensors[NAME][3, 5] = value
    for file in checkpoint.glob("model*safetensors*"):
        file.unlink()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    source = tiny.fetched(checkpoint, folder / "source")
    parts, _ = tiny.split(source, topology=[[0, 1]])
    return PartWeights(parts["layers_00_01"], source), tensors[NAME]
