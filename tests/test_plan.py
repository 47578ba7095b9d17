"""Parts: what each is made of, and that it outlives whatever does not concern it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import limits
import pytest
import tiny
import torch
from convert.small import write_family
from safetensors.torch import load_file, save_file

from shardmill import plan
from shardmill.checkpoint.headers import read_tensors
from shardmill.convert.weights import PartWeights
from shardmill.files import digest, dumps
from shardmill.forms.form import Shape
from shardmill.forms.recipe import recipe
from shardmill.models.architecture import LayerSpec, TensorSource


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("plan") / "checkpoint")


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Path:
    return tiny.fetched(checkpoint, checkpoint.parent / "source")


@pytest.fixture(scope="module")
def parts(source: Path) -> dict[str, plan.Part]:
    return tiny.split(source)[0]


def contents(parts: dict[str, plan.Part]) -> dict[str, str]:
    return {name: digest(part.content) for name, part in parts.items()}


def test_every_byte_of_every_layer_is_in_exactly_one_part(parts: dict[str, plan.Part], source: Path) -> None:
    tensors = read_tensors(source)
    layers = [t for part in parts.values() if part.kind == "layers" for t in part.tensors]
    assert sorted(t.label for t in layers) == sorted(name for name in tensors if ".layers." in name)
    for t in layers:
        assert t.info == tensors[t.label]
        assert f"model.{t.path}" == t.label
        assert t.shape == t.stored


def test_head_slices_cut_the_table_by_rows(parts: dict[str, plan.Part], source: Path) -> None:
    table = read_tensors(source)["model.embed_tokens.weight"]
    slices = [parts["head_0"].tensors[1], parts["head_1"].tensors[1]]
    assert [s.shape for s in slices] == [(128, 96), (128, 96)]
    assert [(s.start, s.end) for s in slices] == [
        (table.start, table.start + 128 * 96 * 2),
        (table.start + 128 * 96 * 2, table.end),
    ]
    assert slices[0].sha256 != slices[1].sha256
    assert [parts[f"head_{j}"].start for j in (0, 1)] == [0, 128]


def test_labels_have_the_rows_of_their_tokens_in_their_order(parts: dict[str, plan.Part], source: Path) -> None:
    """And then the first ones again, up to as many as coremltools puts into a weight file."""
    words = ["None", " return", "default"]
    found, content = tiny.split(source, program={"labels": words})
    tokens = [tiny.train_tokenizer().encode(word).ids[0] for word in words]
    assert tokens != sorted(tokens)
    part, weights = found["labels"], PartWeights(found["labels"], source)
    (row,) = (row for row in content["parts"] if row["kind"] == "labels")
    assert row["tokens"] == tokens and part.row_tokens == [*tokens * 5, tokens[0]]
    table = PartWeights(parts["embedding"], source)["embedding"]
    assert torch.equal(weights["lm_head.weight"], table[part.row_tokens])
    assert torch.equal(weights["norm.weight"], PartWeights(parts["head_0"], source)["norm.weight"])
    other, _ = tiny.split(source, program={"labels": words[::-1]})
    assert digest(other["labels"].content) != digest(part.content)
    plan.write_part(source.parent / "labels.json", part)
    assert plan.load_part(source.parent / "labels.json") == part


def test_an_untied_head_has_a_tensor_of_its_own(tmp_path: Path) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "checkpoint", layers=1, tied=False)
    parts, _ = tiny.split(tiny.fetched(checkpoint, tmp_path / "source"), topology=[[0, 1]])
    assert parts["head_0"].tensors[1].label == "lm_head.weight[0:128]"
    assert parts["embedding"].tensors[0].label == "model.embed_tokens.weight"


def test_hashes_are_those_of_the_bytes(parts: dict[str, plan.Part], source: Path) -> None:
    import hashlib

    for t in (*parts["layers_02_03"].tensors, *parts["head_1"].tensors):
        raw = (source / t.file).read_bytes()[t.start : t.end]
        assert hashlib.sha256(raw).hexdigest() == t.sha256
        assert len(raw) == 2 * math.prod(t.shape)


def test_a_part_survives_being_written(parts: dict[str, plan.Part], tmp_path: Path) -> None:
    for part in parts.values():
        plan.write_part(tmp_path / "p.json", part)
        assert plan.load_part(tmp_path / "p.json") == part


def test_a_new_topology_keeps_the_parts_whose_layers_it_keeps(parts: dict[str, plan.Part], source: Path) -> None:
    other = contents(tiny.split(source, topology=[[0, 2], [2, 4]])[0])
    before = contents(parts)
    assert {name: other[name] for name in ("layers_00_02", "head_0", "head_1", "embedding")} == {
        name: before[name] for name in ("layers_00_02", "head_0", "head_1", "embedding")
    }
    assert other["layers_02_04"] not in before.values()


def test_a_part_does_not_know_in_which_file_its_bytes_lie(
    parts: dict[str, plan.Part], checkpoint: Path, tmp_path: Path
) -> None:
    """The same tensors in one file instead of several, as a new upload may have them."""
    from safetensors import safe_open

    together = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as stream:
            together |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (it is no mapping)
    folder = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    for file in folder.glob("model*safetensors*"):
        file.unlink()
    save_file(dict(reversed(list(together.items()))), folder / "model.safetensors", metadata={"format": "pt"})
    moved, _ = tiny.split(tiny.fetched(folder, tmp_path / "source"))
    assert moved["layers_02_03"].tensors[1].file != parts["layers_02_03"].tensors[1].file
    assert contents(moved) == contents(parts)


def test_a_changed_layer_costs_its_part_and_no_other(
    parts: dict[str, plan.Part], checkpoint: Path, tmp_path: Path
) -> None:
    name = "model.layers.3.mlp.gate_up_proj.weight"
    folder = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    changed = contents(tiny.split(tiny.fetched(folder, tmp_path / "source"))[0])
    before = contents(parts)
    assert [part for part in before if before[part] != changed[part]] == ["layers_03_04"]


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 96},
        {"tokens": 1},
        {"layers": ((1, LayerSpec()), (2, LayerSpec()))},
        {"layers": ((0, LayerSpec()), (1, LayerSpec(rope=None)))},
        {"rows": 9},
        {"kind": "head"},
    ],
)
def test_what_decides_a_package_is_content(parts: dict[str, plan.Part], change: dict[str, object]) -> None:
    part = parts["layers_00_02"]
    assert digest(part.changed(**change).content) != digest(part.content)


CHANGES: list[dict[str, Any]] = [
    {"path": "layers.0.mlp.up_proj.weight"},
    {"dtype": "F16"},
    {"stored": (1,)},
    {"sha256": "0" * 64},
    {"source": TensorSource("a", add=1.0)},
    {"source": TensorSource("a", times=2.0)},
    {"source": TensorSource("a", column=0)},
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_a_constant_is_content(parts: dict[str, plan.Part], change: dict[str, Any]) -> None:
    tensor = parts["layers_00_02"].tensors[1]
    assert replace(tensor, **change).content != tensor.content


def test_neither_the_checkpoint_s_name_of_a_constant_nor_its_place_is_content(parts: dict[str, plan.Part]) -> None:
    """Another family may have the same layer under other names."""
    tensor = parts["layers_00_02"].tensors[1]
    moved = replace(tensor, source=replace(tensor.source, tensor="other"), file="other", start=5, end=9)
    assert moved.content == tensor.content


def test_a_name_is_no_content(parts: dict[str, plan.Part]) -> None:
    """The same rows under another number, as another count of slices would have them."""
    part = parts["head_1"]
    assert digest(replace(part, name="head_3").content) == digest(part.content)


def test_the_graph_s_numbers_are_content_and_the_host_s_are_not(
    parts: dict[str, plan.Part], checkpoint: Path, tmp_path: Path
) -> None:
    """Rotary frequencies are the host's: a config with other ones keeps its packages."""
    part = parts["layers_00_02"]
    other = part.changed(graph=replace(part.spec.graph, rms_norm_eps=1e-6))
    assert digest(other.content) != digest(part.content)
    folder = tiny.copied_checkpoint(checkpoint, tmp_path / "checkpoint")
    tiny.hf_config(original=32).save_pretrained(folder)
    moved, summary = tiny.split(tiny.fetched(folder, tmp_path / "source"))
    assert summary["architecture"]["ropes"]["rope"]["factors"] == "long"
    assert contents(moved) == contents(parts)


def test_taps_of_a_convolution_are_columns_of_one_tensor(tmp_path: Path) -> None:
    """Each constant knows all bytes of the tensor, and the shape of its own values."""
    source = tiny.fetched(write_family(tmp_path / "checkpoint", "lfm2"), tmp_path / "source")
    parts, summary = tiny.split(source, topology=[[0, 2], [2, 4]])
    taps = [t for t in parts["layers_00_02"].tensors if ".tap_" in t.path and t.path.startswith("layers.1.")]
    assert [(t.source.column, t.label, t.stored, t.shape) for t in taps] == [
        (j, "model.layers.1.conv.conv.weight", (128, 1, 3), (128,)) for j in range(3)
    ]
    assert len({t.info for t in taps}) == 1 and len({repr(t.content) for t in taps}) == 3
    values = load_file(source / taps[0].file)["model.layers.1.conv.conv.weight"].float()
    weights = PartWeights(parts["layers_00_02"], source)
    for j, t in enumerate(taps):
        assert torch.equal(weights[t.path], values[:, 0, j])
    assert sum(math.prod(t.shape) for t in taps) == math.prod(taps[0].stored)
    plan.write_part(tmp_path / "p.json", parts["layers_00_02"])
    assert plan.load_part(tmp_path / "p.json") == parts["layers_00_02"]
    rows = {row["name"]: row for row in summary["parts"]}
    assert list(rows["layers_00_02"]["states"]) == ["c_0", "c_1"]
    assert list(rows["layers_02_04"]["states"]) == ["k_2", "v_2", "c_3"]
    assert rows["layers_00_02"]["inputs"]["conv_read_mask"] == [1, 2, 32, "T"]
    assert (summary["conv_taps"], summary["window"]) == (3, None)


def test_a_checkpoint_s_own_values_come_back_from_a_constant(tmp_path: Path) -> None:
    """Gemma's gains are 1 + weight, and some are an eighth of it."""
    source = tiny.fetched(write_family(tmp_path / "checkpoint", "gemma3_text"), tmp_path / "source")
    parts, _ = tiny.split(source, topology=[[0, 4]])
    weights = PartWeights(parts["layers_00_04"], source)
    stored = {n: t for f in source.glob("*.safetensors") for n, t in load_file(f).items()}
    first, second = ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight")
    assert torch.equal(weights[first], 1 + stored[f"model.{first}"].float())
    assert torch.equal(weights[second], (1 + stored[f"model.{second}"].float()) / 8)
    (table,) = PartWeights(parts["embedding"], source).values()
    expected = stored["model.embed_tokens.weight"].float() * (math.sqrt(128) / 8)
    limits.numbers_agree("the table", table, expected, limits.roundings("fp32", 2), size=expected.abs())


def bytes_of(name: str, shapes: Mapping[str, Shape]) -> int:
    """Bytes of constants in a form, without the weight file's padding."""
    return sum(recipe(name).bytes_by_form(shapes).values())


def test_byte_budgets_are_those_of_the_converted_weights(parts: dict[str, plan.Part]) -> None:
    """One byte per element of an INT8 matrix and two for each scale, two of a vector and of anything in fp16."""
    h, f = tiny.HIDDEN, tiny.FFN
    matrices, vectors, rows = (3 + 2) * 32 * h + 96 * h + 3 * f * h, 2 * h, (3 + 2) * 32 + 96 + 2 * f + h
    shapes = parts["layers_00_02"].shapes
    assert bytes_of("int8", shapes) == 2 * (matrices + 2 * vectors + 2 * rows)
    assert bytes_of("int4", shapes) == 2 * (matrices // 2 + 2 * vectors + 2 * rows)
    assert bytes_of("fp16", shapes) == 2 * (2 * matrices + 2 * vectors)
    assert bytes_of("int8", parts["head_0"].shapes) == 128 * h + 2 * 128 + 2 * h
    assert bytes_of("int4", parts["head_0"].shapes) == 128 * h + 2 * 128 + 2 * h  # the head stays in INT8


def test_plan_json_holds_what_the_host_needs(source: Path) -> None:
    _, summary = tiny.split(source)
    rope = summary["architecture"]["ropes"]["rope"]
    assert (len(rope["inv_freq"]), rope["factors"]) == (tiny.ROPE_DIM // 2, "short")
    assert rope["scale"] == pytest.approx(
        math.sqrt(1 + math.log(tiny.LONGEST / tiny.ORIGINAL) / math.log(tiny.ORIGINAL))
    )
    assert (summary["context"], summary["tokens_max"], summary["widths"]) == (64, 4, [1, 4])
    assert summary["verify"] == 4
    assert [row["name"] for row in summary["parts"]] == [
        "layers_00_02",
        "layers_02_03",
        "layers_03_04",
        "head_0",
        "head_1",
        "embedding",
    ]
    assert summary["weight_file_limit"] == 2**30
    assert summary["systems"] == ["macOS 15", "macOS 26", "macOS 27", "iOS 18", "iOS 26", "iOS 27"]
    assert summary["eos_token_ids"] == [0]
    dumps(summary)
