"""Every tensor of a part goes to its own place in the weight file, and a mismatch is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardmill.convert import stream, template
from shardmill.convert.package import StampError, weight_sites
from shardmill.convert.placing import place
from shardmill.convert.stamped import set_forms
from shardmill.convert.weights import block
from shardmill.models.architecture import TensorSource
from shardmill.models.sources import turned
from shardmill.plan import Constant, Part

from .small import head_part, write_checkpoint

INT8 = {"lm_head.weight": "int8"}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Part, Path]:
    folder = write_checkpoint(tmp_path_factory.mktemp("weights") / "checkpoint")
    return head_part(folder, 0, 32), folder


def composed(part: Part) -> object:
    spec = template.program(part.spec, None)
    set_forms(spec, INT8)
    return spec


def test_a_tensor_that_the_program_does_not_use_is_told(head: tuple[Part, Path]) -> None:
    part, _ = head
    spec = composed(part)
    few = replace(part, tensors=part.tensors[:1])
    with pytest.raises(StampError, match="lm_head_weight"):
        place(spec, few, INT8)


@pytest.mark.parametrize("stored", [(16, 64), (32, 63)])
def test_a_tensor_of_another_shape_is_told(head: tuple[Part, Path], stored: tuple[int, int]) -> None:
    part, _ = head
    norm, rows = part.tensors
    with pytest.raises(StampError, match="lm_head_weight"):
        place(composed(part), replace(part, tensors=(norm, replace(rows, stored=stored))), INT8)


def test_unused_tensors_are_told(head: tuple[Part, Path]) -> None:
    part, _ = head
    more = replace(part, tensors=(*part.tensors, replace(part.tensors[0], path="lm_head.bias")))
    with pytest.raises(StampError, match=r"lm_head_bias: a tensor of .* not use"):
        place(composed(part), more, INT8)


@pytest.mark.parametrize("size", [1, 64, 7 * 64, 1 << 18])
def test_blocks_of_any_size_and_any_order_give_the_same_file(
    size: int, head: tuple[Part, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, source = head
    blobs, weights = place(composed(part), part, INT8)
    stream.write_weights(tmp_path / "whole", blobs, weights, source, threads=1)
    monkeypatch.setattr(stream, "BLOCK", size)
    stream.write_weights(tmp_path / "blocks", blobs, weights[::-1], source, threads=4)
    assert (tmp_path / "blocks").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("source", "blocks"),
    [
        (TensorSource("w"), [8, 8, 8]),
        (TensorSource("w", rows=(8, 24, 1), shape=(24, 24)), [8, 8]),
        (TensorSource("w", transposed=True), [24]),
        (TensorSource("w", rows=(0, 24, 2), shape=(24, 24)), [12]),
        (TensorSource("w", repeat=2), [48]),
        (TensorSource("w", magnitude="divide"), [24]),
    ],
    ids=["whole", "some rows", "transposed", "every second row", "repeated", "divided by its magnitude"],
)
def test_rows_are_read_a_few_at_a_time_where_they_lie_one_after_the_other(
    source: TensorSource, blocks: list[int], tmp_path: Path
) -> None:
    """What bounds the memory of a thread; rows that lie apart, or depend on all others, are read all at once."""
    values = torch.arange(24 * 24, dtype=torch.float32).reshape(24, 24)
    (tmp_path / "w").write_bytes(values.numpy().tobytes())
    tensor = Constant("w", source, None, "w", 0, 4 * values.numel(), "F32", (24, 24))
    rows = stream.RowRange((tensor,))
    found = [rows.read(row, 8 * 24, tmp_path) for row in rows.starts(8 * 24)]
    assert [len(one) for one in found] == blocks
    assert torch.equal(torch.cat(found).float(), turned(values, source).float())


def test_torch_gets_its_threads_back(head: tuple[Part, Path], tmp_path: Path) -> None:
    part, source = head
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stream.write_weights(tmp_path / "w", *place(composed(part), part, INT8), source, threads=2)
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as pool:  # a thread starts with what was set last in any
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


def test_records_lead_to_the_tensors(head: tuple[Part, Path], tmp_path: Path) -> None:
    """The offsets in the program are those at which the weight file holds what it should."""
    part, source = head
    spec = composed(part)
    blobs, weights = place(spec, part, INT8)
    stream.write_weights(tmp_path / "w", blobs, weights, source, threads=2)
    content = (tmp_path / "w").read_bytes()
    offsets = [v.blobFileValue.offset for _, values in weight_sites(spec) for v in values]
    stored, levels, scale = (
        torch.frombuffer(bytearray(content[offset + 64 : offset + 64 + b.size]), dtype=dtype)
        for offset, b, dtype in zip(offsets, blobs, (torch.float16, torch.int8, torch.float16), strict=True)
    )
    norm, rows = (block(tensor, source) for tensor in part.tensors)
    assert torch.equal(stored, norm.half())
    original = rows.float()
    difference = levels.reshape(original.shape).float() * scale[:, None].float() - original
    # Half a level, and what fp16 rounds off the scale (127 * 2^-11) and the quotient (2^-5).
    assert (difference.abs() <= 0.6 * scale[:, None].float()).all()
