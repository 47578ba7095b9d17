"""A rotated checkpoint is the same model to transformers, and a model that can't be rotated is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import limits
import pytest
import torch
from models.tiny_families import limit_of, tiny_text, write_tiny
from safetensors.torch import load_file, save_file
from shardmill_lab import rotate as precision_rotate
from shardmill_lab.rotate import rotate_checkpoint
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from shardmill import cli
from shardmill.checkpoint.headers import read_tensors
from shardmill.checkpoint.paths import INDEX_FILE
from shardmill.convert.weights import read_info
from shardmill.errors import CheckpointError, GateError

ROTATED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite")
NOT = ("gemma3_text", "gemma2", "olmo2", "granitemoe", "lfm2")  # norms behind matrices, experts, convolutions


def logits(source: Path) -> torch.Tensor:
    """By transformers' own loading and forward pass, [n, vocab]."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(source, **options).eval()(torch.tensor([tiny_text(24)])).logits[0]


@pytest.mark.parametrize("family", ROTATED)
def test_transformers_computes_the_same_with_other_weights(family: str, tmp_path: Path) -> None:
    source = write_tiny(family, tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    limits.agrees("what the step says", rotate_checkpoint(source, tmp_path / "rotated"), limit_of(model))
    limits.rows_agree("the rotated model", logits(tmp_path / "rotated"), logits(source), limit_of(model))
    before, after = read_tensors(source), read_tensors(tmp_path / "rotated")
    assert set(after) == set(before) | {precision_rotate.HEAD}
    for name in set(before) - {precision_rotate.HEAD}:
        if name.endswith("weight") and not name.endswith(("q_norm.weight", "k_norm.weight")):
            old, new = read_info(before[name], source), read_info(after[name], tmp_path / "rotated")
            assert not torch.equal(old.float(), new), name


def test_it_repeats_to_the_bit(tmp_path: Path) -> None:
    source = write_tiny("qwen2", tmp_path / "source")
    for name in ("a", "b"):
        rotate_checkpoint(source, tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir()) and "rotation.json" in files
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


@pytest.mark.parametrize("family", NOT)
def test_a_model_that_cant_be_rotated_is_refused(family: str, tmp_path: Path) -> None:
    source = write_tiny(family, tmp_path / "source")
    with pytest.raises(CheckpointError, match="can't be rotated"):
        rotate_checkpoint(source, tmp_path / "rotated")
    assert not (tmp_path / "rotated").exists()


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "source")
    name = "model.layers.0.mlp.down_proj.weight"
    file = source / read_tensors(source)[name].file
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} is F8_E4M3; only weights that are not quantised"):
        rotate_checkpoint(source, tmp_path / "rotated")


@pytest.mark.parametrize("gone", ["lm_head.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(gone: str, tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "source", tie_word_embeddings=False)
    file = source / read_tensors(source)[gone].file
    save_file({name: tensor for name, tensor in load_file(file).items() if name != gone}, file, {"format": "pt"})
    index = source / INDEX_FILE
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {name: place for name, place in places.items() if name != gone}}))
    with pytest.raises(CheckpointError, match=f"1 missing \\({gone}\\)"):
        rotate_checkpoint(source, tmp_path / "rotated")
    assert not (tmp_path / "rotated").exists()


def test_a_head_that_is_not_the_tied_table_and_a_nan_are_refused_by_name(tmp_path: Path) -> None:
    source = write_tiny("qwen2", tmp_path / "source", tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    file = source / read_tensors(source)[table].file
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": 2 * tensors[table]}, file, {"format": "pt"})
    index = json.loads((source / INDEX_FILE).read_text())
    index["weight_map"]["lm_head.weight"] = file.name
    (source / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding table"):
        rotate_checkpoint(source, tmp_path / "rotated")
    nan = torch.full_like(tensors[table], torch.nan)
    save_file({**tensors, table: nan, "lm_head.weight": nan.clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not every weight is finite: lm_head\.weight"):
        rotate_checkpoint(source, tmp_path / "rotated")


def test_a_disk_without_room_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is fp32 and has an LM head of its own, so it is larger than what it is made from."""
    source = write_tiny("qwen2", tmp_path / "source", tie_word_embeddings=True)
    rotate_checkpoint(source, tmp_path / "first")
    needed = sum(tensor.end - tensor.start for tensor in read_tensors(tmp_path / "first").values())
    used = shutil.disk_usage(tmp_path)
    for free, refused in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: used._replace(free=free))
        with pytest.raises(CheckpointError, match="disk full") if refused else nullcontext():
            rotate_checkpoint(source, tmp_path / f"{free}")
    assert not (tmp_path / f"{needed - 1}").exists()


def test_what_is_no_checkpoint_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as said:
        rotate_checkpoint(tmp_path / "none", tmp_path / "rotated")
    assert str(said.value).count(str(tmp_path / "none")) == 1


@pytest.mark.parametrize("wrong", ["_ones", "_with_inputs", "_with_values", "rotated_outputs"])
def test_a_wrong_rotation_leaves_nothing(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' logits are compared, so neither a mistake of ours nor a model of other norms gets through."""
    source = write_tiny("qwen3", tmp_path / "source")
    monkeypatch.setattr(precision_rotate, wrong, lambda tensor, *_: tensor.float())
    with pytest.raises(GateError, match="can't be rotated exactly"):
        rotate_checkpoint(source, tmp_path / "rotated")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_on_the_command_line(tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "source")
    said = CliRunner().invoke(cli.app, ["rotate", str(source), str(tmp_path / "rotated")])
    assert said.exit_code == 0, said.output
    assert "its logits differ from the original's by" in said.stdout
    assert json.loads((tmp_path / "rotated/config.json").read_text())["tie_word_embeddings"] is False
    again = CliRunner().invoke(cli.app, ["rotate", str(source), str(tmp_path / "rotated")])
    assert again.exit_code == 1 and "is there already" in again.stderr and again.stderr.count("\n") == 1
