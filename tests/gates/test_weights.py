"""Weights read back from a package, and their distance from the checkpoint's."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from shardmill.convert.weights import PartWeights
from shardmill.errors import GateError
from shardmill.gates.weights import PackageWeights, weight_steps


@pytest.fixture(scope="module")
def stored(built: tiny.Build) -> PackageWeights:
    return PackageWeights(built.packages["layers_02_03"], built.parts["layers_02_03"])


@pytest.fixture(scope="module")
def original(built: tiny.Build) -> dict[str, torch.Tensor]:
    return dict(PartWeights(built.parts["layers_02_03"], built.source))


PROJECTION, NORM = "model.layers.2.mlp.down_proj.weight", "model.layers.2.input_layernorm.weight"


def test_every_tensor_is_there_in_the_checkpoint_s_shape(
    stored: PackageWeights, original: dict[str, torch.Tensor], built: tiny.Build
) -> None:
    dequantised = tiny.dequantised(built)
    for name, values in original.items():
        assert stored(name).shape == values.shape
        torch.testing.assert_close(stored(name), dequantised[name], rtol=0, atol=0)


def test_rounding_is_half_a_step(stored: PackageWeights, original: dict[str, torch.Tensor]) -> None:
    worst, name = weight_steps(stored, original)
    assert 0.4 < worst < 0.6
    assert name in original


@pytest.mark.parametrize("name", [PROJECTION, NORM])
def test_one_weight_off_by_two_steps_is_named(
    stored: PackageWeights, original: dict[str, torch.Tensor], name: str
) -> None:
    moved = original[name].clone()
    step = stored.scale(name)
    moved.view(-1)[5] += 2.1 * (float(step[0]) if step is not None else float(moved.view(-1)[5]) * 2**-10)
    worst, where = weight_steps(stored, {**original, name: moved})
    assert worst > 1
    assert where == name


def test_a_nan_is_no_small_distance(stored: PackageWeights, original: dict[str, torch.Tensor]) -> None:
    spoilt = original[PROJECTION].clone()
    spoilt[0, 0] = math.nan
    worst, _ = weight_steps(stored, {**original, PROJECTION: spoilt})
    assert not worst <= 1


def test_a_package_of_another_part_does_not_hold_it(built: tiny.Build) -> None:
    other = PackageWeights(built.packages["layers_03_04"], built.parts["layers_02_03"])
    with pytest.raises(GateError, match=r"layers_03_04\.mlpackage does not hold model\.layers\.2\."):
        other(NORM)
