"""A matrix in blocks of rows is the matrix, and a linear layer that is given it so computes what it did."""

from __future__ import annotations

from pathlib import Path

import limits
import pytest
import tiny
import torch
from models.tiny_families import limit_of, write_tiny
from torch import Tensor, nn

from shardmill.gates import naming, stored
from shardmill.gates.naming import lend, matrix_rows, take_back
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.stored import Stored
from shardmill.gates.weights import PackageWeights


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are no divisor of any matrix here."""
    for module in (naming, stored):
        monkeypatch.setattr(module, "rows_at_once", lambda columns: 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_comes_in_fp32_and_once(dtype: torch.dtype) -> None:
    matrix = torch.randn(23, 5).to(dtype)
    blocks = [block.clone() for block in matrix_rows(lambda name: matrix, "any")]
    assert [len(block) for block in blocks] == [7, 7, 7, 2]
    assert torch.equal(torch.cat(blocks), matrix.float()) and blocks[0].dtype == torch.float32


@pytest.mark.parametrize("span", [(0, 20), (3, 17), (14, 15)])
def test_rows_of_a_constant_are_scaled_by_their_own_steps(span: tuple[int, int]) -> None:
    """A matrix may begin and end anywhere in a constant that holds several."""
    codes, scale = torch.randint(-128, 128, (20, 6), dtype=torch.int8), torch.rand(20, 1)
    found = torch.cat([rows.clone() for rows in Stored(codes, scale).rows(*span)])
    assert torch.equal(found, (codes.float() * scale)[slice(*span)])
    tables = torch.randn(5, 16).half()
    found = torch.cat([rows.clone() for rows in Stored(codes.abs() % 16, tables=tables).rows(*span)])
    assert torch.equal(found, Stored(codes.abs() % 16, tables=tables).whole()[slice(*span)])


def test_a_package_s_matrices_are_what_they_are_as_a_whole(built: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3's packed projections are three constants, of which none is ever made whole."""
    part = built.parts["layers_02_03"]
    package = PackageWeights(built.packages["layers_02_03"], part)
    names = {f"model.{tensor.source.tensor.removeprefix('model.')}" for tensor in part.tensors if len(tensor.shape) > 1}
    expected = {name: package(name) for name in names}
    assert any("qkv_proj" in name for name in names)
    monkeypatch.setattr(Stored, "whole", lambda self: pytest.fail("made whole"))
    for name in names:
        assert torch.equal(torch.cat([rows.clone() for rows in matrix_rows(package, name)]), expected[name]), name


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "granite", "qwen3_moe", "lfm2"])
def test_layers_compute_what_they_do_with_their_matrices_whole(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, scaled and stacked tensors included; afterwards nothing of it is left in the model."""
    source = write_tiny(family, tmp_path / "checkpoint")
    reference, weights = Reference(source, 64), checkpoint_weights(source)
    hidden = torch.randn(5, reference.model.config.hidden_size)
    indices = range(len(reference.decoder.layers))
    found = reference.layers(hidden, indices, weights)
    linear = [module for module in reference.model.modules() if type(module) is nn.Linear]
    assert linear and not any("forward" in vars(module) for module in linear)
    monkeypatch.setattr(naming, "lend", lambda *_: set())
    for one, other in zip(found, reference.layers(hidden, indices, weights), strict=True):
        limits.rows_agree("a layer's output", one, other, limit_of(reference.model))


def test_a_class_made_from_a_linear_layer_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    module = nn.Sequential(nn.Linear(3, 4), Doubled(4, 5))
    assert lend(module, "", {}, lambda name: torch.ones(4, 3)) == {"0.weight"}
    take_back(module)
    assert not any("forward" in vars(each) for each in module)
