"""Packages with matrices in several forms are coremltools' own, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from shardmill.convert.plain import convert_plain
from shardmill.convert.stamped import convert_stamped
from shardmill.forms.form import matrices
from shardmill.plan import Part

from .small import described, draft, head_part, layers_part, write_checkpoint, write_family


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forms") / "checkpoint")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of two kinds, so programs in normal form."""
    return write_family(tmp_path_factory.mktemp("family") / "checkpoint", "gemma3_text")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def in_turn(part: Part, *names: str) -> dict[str, str]:
    """The forms in turn, matrix by matrix."""
    return {path: names[i % len(names)] for i, path in enumerate(matrices(part.shapes))}


def both(part: Part, source: Path, forms: str | Mapping[str, str], cache: Path, folder: Path) -> tuple[Path, Path]:
    """The package by coremltools alone, and the stamped one."""
    plain, stamped = folder / "plain.mlpackage", folder / "stamped.mlpackage"
    convert_plain(part, source, forms, plain)
    convert_stamped(part, source, forms, stamped, cache, threads=3)
    return plain, stamped


MIXES = [
    pytest.param(("int4",), id="all INT4"),
    pytest.param(("int4", "int8", "fp16"), id="linear forms"),
    pytest.param(("palette4", "fp16"), id="palettes and fp16"),
    pytest.param(("palette6/16", "int4", "palette8", "int8", "fp16", "palette4/32"), id="all kinds"),
]


@pytest.mark.parametrize("mix", MIXES)
def test_layers_are_plain_coremltools_byte_for_byte(
    mix: tuple[str, ...], checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    part = layers_part(checkpoint, 1, 3)
    plain, stamped = both(part, checkpoint, in_turn(part, *mix), cache, tmp_path)
    assert files(stamped) == files(plain)


@pytest.mark.parametrize("form", ["int4", "palette4", "palette6/32", "palette8/16"])
def test_heads_are_plain_coremltools_byte_for_byte(form: str, checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    plain, stamped = both(head_part(checkpoint, 32, 64), checkpoint, form, cache, tmp_path)
    assert files(stamped) == files(plain)


def test_layers_of_other_kinds_are_plain_coremltools_byte_for_byte(family: Path, cache: Path, tmp_path: Path) -> None:
    layers = described(family).architecture.layers
    part = draft(family, [[0, layers]])[f"layers_00_{layers:02d}"]
    mix = in_turn(part, "int8", "int4", "palette4/8", "fp16")
    plain, stamped = both(part, family, mix, cache, tmp_path)
    assert files(stamped) == files(plain)
