"""The embedding table is compared with the checkpoint's row by row, all of it, in little memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardmill.convert.table import write_table
from shardmill.errors import GateError
from shardmill.gates import rounding, stored
from shardmill.gates.measurement import Measurement
from shardmill.gates.reference import checkpoint_weights
from shardmill.gates.rounding import table_parity
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.runtime.engine import read_tables


def compared(build: tiny.Build, file: Path, values: Tensor, factor: float = 1.0) -> Measurement:
    """The measurement of a table that holds these values."""
    save_file({"embedding": values}, file)
    (tensor,) = build.parts["embedding"].tensors
    scaled = replace(tensor, source=replace(tensor.source, times=factor))
    return table_parity(replace(build.parts["embedding"], tensors=(scaled,)), build.source, file)[0]


@pytest.fixture
def rows(built: tiny.Build) -> Tensor:
    """The sound table's."""
    return load_file(built.table)["embedding"].clone()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks, the last of them shorter."""
    for module in (rounding, stored):
        monkeypatch.setattr(module, "rows_at_once", lambda columns: 100)


def test_a_sound_table_is_at_most_rounded(built: tiny.Build) -> None:
    found = table_parity(built.parts["embedding"], built.source, built.table)
    assert [row.name for row in found] == ["weight_steps", "subnormal_steps", "scale_steps"]
    assert 0.4 < found[0].value <= 0.5 and (found[1].value, found[2].value) == (0, 0)


def test_a_table_that_was_cut_off_in_place_of_rounded_is_refused(built: tiny.Build, tmp_path: Path) -> None:
    wide = checkpoint_weights(built.source)("model.embed_tokens.weight").float() * 1.37  # no longer numbers of fp16
    cut = (wide.view(torch.int32) & ~0x1FFF).view(torch.float32).half()  # keeps ten of the digits, toward zero
    rounded, worst = (compared(built, tmp_path / "t.safetensors", rows, 1.37) for rows in (wide.half(), cut))
    limit = THRESHOLDS["weight_steps"]
    assert limit.holds(rounded.value) and not limit.holds(worst.value)


@pytest.mark.parametrize("token", [0, 99, 100, 255])
@pytest.mark.parametrize("spoilt", [2.0, math.nan, math.inf])
def test_one_value_of_any_row_is_named(
    built: tiny.Build, rows: Tensor, tmp_path: Path, token: int, spoilt: float
) -> None:
    rows[token, 5] = spoilt
    found = compared(built, tmp_path / "t.safetensors", rows)
    assert not found.value <= 1
    assert found.detail == f"model.embed_tokens.weight, token {token}"


def test_a_table_may_hold_the_scaled_embeddings(built: tiny.Build, rows: Tensor, tmp_path: Path) -> None:
    """Of a model that multiplies them by a constant; then the plain ones are wrong."""
    factor = 96**0.5
    scaled = (checkpoint_weights(built.source)("model.embed_tokens.weight").float() * factor).half()
    assert compared(built, tmp_path / "t.safetensors", scaled, factor).value <= 1
    assert compared(built, tmp_path / "t.safetensors", rows, factor).value > 100
    assert compared(built, tmp_path / "t.safetensors", scaled).value > 100


@pytest.mark.parametrize("wrong", [{"embedding": (255, 96)}, {"embedding": (96, 256)}, {"other": (256, 96)}])
def test_a_table_of_another_shape_is_refused(
    built: tiny.Build, tmp_path: Path, wrong: dict[str, tuple[int, ...]]
) -> None:
    file = tmp_path / "t.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in wrong.items()}, file)
    with pytest.raises(GateError, match=r"t\.safetensors: model\.embed_tokens\.weight is \[256, 96\], the table is"):
        table_parity(built.parts["embedding"], built.source, file)


def test_no_more_than_a_block_is_read_at_a_time(built: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of a large model is more than a gigabyte, twice."""
    sizes: list[int] = []
    real = np.fromfile

    def counted(file: Path, dtype: type, count: int, offset: int) -> object:
        sizes.append(count)
        return real(file, dtype, count, offset=offset)

    monkeypatch.setattr(np, "fromfile", counted)
    table_parity(built.parts["embedding"], built.source, built.table)
    row = 2 * tiny.HIDDEN
    assert sizes == [100 * row] * 4 + [56 * row] * 2


@pytest.mark.parametrize("spoil", [False, True])
def test_a_table_in_int8_counts_in_steps_of_its_rows(built: tiny.Build, tmp_path: Path, spoil: bool) -> None:
    """As it is written, half a step at most; and two steps off in one row are told."""
    part, file = built.parts["embedding"], tmp_path / "t.safetensors"
    write_table(part, built.source, file, 1, "int8")
    tensors = load_file(file)
    tensors = {name: values.clone() for name, values in tensors.items()}
    if spoil:
        tensors["embedding"][130, 7] += 2 if tensors["embedding"][130, 7] < 0 else -2
    save_file(tensors, file)
    found, subnormal, scales = table_parity(part, built.source, file)
    assert subnormal.value == 0 and scales.value <= 1
    assert (found.value > 1) == spoil
    assert found.value > 1.4 or 0.4 < found.value < 0.6
    assert not spoil or found.detail == "model.embed_tokens.weight, token 130"


def test_rows_in_int8_are_what_the_host_looks_up(built: tiny.Build, tmp_path: Path) -> None:
    part, file = built.parts["embedding"], tmp_path / "t.safetensors"
    write_table(part, built.source, file, 1, "int8")
    found, plain = read_tables(file)["embedding"], read_tables(built.table)["embedding"]
    held = load_file(file)
    expected = held["embedding"].float() * held["embedding.scale"].float()[:, None]
    ids = [5, 200, 5, 0]
    assert found.shape == plain.shape == (tiny.VOCAB, tiny.HIDDEN)
    assert np.array_equal(found[ids], expected[ids].numpy()) and np.array_equal(found[:], expected.numpy())
    assert found[3].shape == (tiny.HIDDEN,)
    assert 0 < float(np.abs(found[:] - plain[:]).max()) <= float(held["embedding.scale"].max()) * 0.6


def test_a_table_in_int8_with_doubled_scales_is_refused(built: tiny.Build, tmp_path: Path) -> None:
    """Its codes are within half a step of what they stand for, and use half of their range."""
    part, file = built.parts["embedding"], tmp_path / "t.safetensors"
    write_table(part, built.source, file, 1, "int8")
    tensors = {name: values.clone() for name, values in load_file(file).items()}
    scale = tensors["embedding.scale"] = tensors["embedding.scale"] * 2
    rows = checkpoint_weights(built.source)("model.embed_tokens.weight").float()
    tensors["embedding"] = (rows / scale.float()[:, None]).round().to(torch.int8)
    save_file(tensors, file)
    steps, _, scales = table_parity(part, built.source, file)
    assert THRESHOLDS["weight_steps"].holds(steps.value) and scales.value == pytest.approx(1024, rel=0.01)
    assert not THRESHOLDS["scale_steps"].holds(scales.value)


def test_rows_of_a_table_with_subnormal_scales_count_apart(built: tiny.Build, tmp_path: Path) -> None:
    """Padding rows are next to nothing, and their scales have few digits."""
    part, file = built.parts["embedding"], tmp_path / "t.safetensors"
    write_table(part, built.source, file, 1, "int8")
    tensors = {name: values.clone() for name, values in load_file(file).items()}
    tensors["embedding.scale"][7] = 2.0**-20
    save_file(tensors, file)
    steps, subnormal, _ = table_parity(part, built.source, file)
    assert steps.value < 0.6 and subnormal.value > 1 and subnormal.detail.endswith("token 7")
