"""Stamped packages are the plain conversion's, byte for byte, whoever makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import convert_plain

from shardmill.checkpoint.hashing import tree_hash
from shardmill.convert import template, trace, weights
from shardmill.convert.stamped import convert_stamped
from shardmill.errors import CheckpointError
from shardmill.models.contract import GraphSpec
from shardmill.plan import Part

from .small import head_part, layers_part, write_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stamped") / "checkpoint")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def modes(folder: Path) -> dict[str, int]:
    return {f.relative_to(folder).as_posix(): f.stat().st_mode for f in folder.rglob("*")}


def part_of(checkpoint: Path, kind: str, start: int, end: int) -> Part:
    return (layers_part if kind == "layers" else head_part)(checkpoint, start, end)


CASES = [
    pytest.param("layers", 5, 6, "int8", id="one layer"),
    pytest.param("layers", 1, 6, "int8", id="five layers"),
    pytest.param("layers", 4, 6, "fp16", id="fp16 weights"),
    pytest.param("head", 32, 64, "int8", id="a slice of the head"),
    pytest.param("head", 32, 64, "fp16", id="a slice of the head in fp16"),
]


@pytest.mark.thorough(but=["one layer", "a slice of the head", "a slice of the head in fp16"])
@pytest.mark.parametrize(("kind", "start", "end", "quantization"), CASES)
def test_package_is_plain_coremltools_byte_for_byte(
    kind: str, start: int, end: int, quantization: str, checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    part = part_of(checkpoint, kind, start, end)
    convert_plain(part, checkpoint, quantization, tmp_path / "plain.mlpackage")
    convert_stamped(part, checkpoint, quantization, tmp_path / "stamped.mlpackage", cache)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")
    assert modes(tmp_path / "stamped.mlpackage") == modes(tmp_path / "plain.mlpackage")


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_checkpoints_of_other_dtypes_give_the_plain_weights(
    dtype: str, checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    part = rewritten(head_part(checkpoint, 0, 32), checkpoint, tmp_path / "source", dtype)
    source = tmp_path / "source"
    convert_plain(part, source, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", cache)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


def rewritten(part: Part, checkpoint: Path, source: Path, dtype: str, spoil: float | None = None) -> Part:
    """The part with its tensors copied to a file of `dtype`; `spoil` replaces the last value of the last tensor."""
    source.mkdir()
    tensors, content = [], b""
    for tensor in part.tensors:
        values = weights.read_tensor(tensor, checkpoint).float().numpy().copy()
        if spoil is not None and tensor is part.tensors[-1]:
            values.flat[-1] = spoil
        raw = values.astype({"F16": np.float16, "F32": np.float32}[dtype]).tobytes()
        tensors.append(replace(tensor, file="t.bin", start=len(content), end=len(content) + len(raw), dtype=dtype))
        content += raw
    (source / "t.bin").write_bytes(content)
    return replace(part, tensors=tuple(tensors))


@pytest.mark.parametrize("value", [65520.0, float("nan"), float("-inf")])
@pytest.mark.parametrize("quantization", ["int8", "fp16"])
def test_weights_that_fp16_cannot_hold_are_refused_by_name(
    value: float, quantization: str, checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    part = rewritten(head_part(checkpoint, 0, 32), checkpoint, tmp_path / "source", "F32", value)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight\[0:32\]: .* 65504"):
        convert_stamped(part, tmp_path / "source", quantization, tmp_path / "p.mlpackage", cache)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight\[0:32\]: .* 65504"):
        weights.PartWeights(part, tmp_path / "source")["lm_head.weight"]


def test_a_checkpoint_cut_short_is_refused(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    part = rewritten(head_part(checkpoint, 0, 32), checkpoint, tmp_path / "source", "F16")
    file = tmp_path / "source" / "t.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=r"t\.bin: ends within model\.embed_tokens"):
        convert_stamped(part, tmp_path / "source", "int8", tmp_path / "p.mlpackage", cache)


def test_templates_are_kept_between_processes_and_damaged_ones_made_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    original = trace.convert

    def counted(spec: GraphSpec) -> Any:
        made.append(1)
        return original(spec)

    monkeypatch.setattr(trace, "convert", counted)
    part, hashes = head_part(checkpoint, 0, 32), set()

    def convert(name: str) -> int:
        template.template.cache_clear()  # as a new process would start
        made.clear()
        convert_stamped(part, checkpoint, "int8", tmp_path / name, tmp_path / "cache")
        hashes.add(tree_hash(tmp_path / name))
        return len(made)

    assert convert("first.mlpackage") == 1
    assert convert("second.mlpackage") == 0
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text(file.read_text().replace("A", "B", 1))
    assert convert("third.mlpackage") == 1
    assert convert("fourth.mlpackage") == 0
    assert len(hashes) == 1


def test_a_template_serves_every_part_of_its_kind_and_widths_only(checkpoint: Path) -> None:
    part = layers_part(checkpoint, 1, 3)
    same = [part, layers_part(checkpoint, 2, 6), layers_part(checkpoint, 1, 2), part.changed(taps=(2,))]
    other = [
        head_part(checkpoint, 0, 32),
        part.changed(slots=96),
        part.changed(tokens=1),
        part.changed(graph=replace(part.spec.graph, rms_norm_eps=1e-6)),
        part.changed(graph=replace(part.spec.graph, hidden=128)),
    ]
    found = [template.separate(each.spec, [None] * len(each.spec.layers))[0] for each in (*same, *other)]
    assert len(set(found[: len(same)])) == 1
    assert len(set(found)) == 1 + len(other)
