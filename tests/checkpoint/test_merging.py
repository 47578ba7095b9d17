"""An adapter that is merged into a fetched checkpoint: the weights that PEFT makes, and what is refused or kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapters
import limits
import pytest
import tiny
import torch
from models import tiny_families
from peft import PeftModel
from safetensors.torch import load_file, save_file

from shardmill.checkpoint.fetch import fetch, unmerged
from shardmill.checkpoint.hashing import hash_file
from shardmill.checkpoint.paths import RECORD_FILE
from shardmill.checkpoint.peft import WEIGHTS
from shardmill.errors import CheckpointError

FAMILIES = ("phi3", "qwen3", "gemma3", "qwen3_5_text", "lfm2", "mixtral", "nemotron_h")
OPTIONS: dict[str, dict[str, Any]] = {  # of each adapter
    "phi3": {"use_rslora": True},
    "qwen3": {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"v_proj": 2}},
    "gemma3": {"target_modules": r".*language_model.*\.(q_proj|up_proj)"},
    "mixtral": {"target_modules": ["q_proj", "o_proj"]},
    "nemotron_h": {"target_modules": ["q_proj", "up_proj", "down_proj"]},  # PEFT refuses Mamba's out_proj
}


def fetched(source: Path, dest: Path, adapter: Path | None, changes: list[str] | None = None) -> dict[str, Any]:
    told = changes if changes is not None else []
    return fetch(
        path=source, repo=None, revision=None, dest=dest, cache=None, adapter=adapter,
        before_change=lambda: told.append("changed"),
    )  # fmt: skip


def loaded(source: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig

    auto = tiny.auto_class(AutoConfig.from_pretrained(source))
    return auto.from_pretrained(source, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_those_that_peft_merges(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit in bf16; in fp32 the sums may be added up in another order."""
    base = tmp_path / "base"
    source = tiny.write_checkpoint(base) if family == "phi3" else tiny_families.write_tiny(family, base)
    for file in source.glob("*.safetensors"):
        save_file({name: one.to(dtype) for name, one in load_file(file).items()}, file, {"format": "pt"})
    lora = adapters.write_lora(source, tmp_path / "lora", 1, **OPTIONS.get(family, {}))
    fetched(source, tmp_path / "merged", lora)
    expected = PeftModel.from_pretrained(loaded(source, dtype), str(lora)).merge_and_unload().state_dict()
    found, before = loaded(tmp_path / "merged", dtype).state_dict(), loaded(source, dtype).state_dict()
    assert found.keys() == expected.keys() == before.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight) or dtype == torch.float32, name
        limits.numbers_agree(
            name, found[name], weight, limits.sums("fp32", 8)
        )  # of the adapter's rank, in either order
    assert sum(not torch.equal(found[name], before[name]) for name in found) >= 4


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of several files, and an adapter of one layer."""
    source = tiny_families.write_tiny("qwen3", tmp_path / "base")
    return source, adapters.write_lora(source, tmp_path / "lora", layers_to_transform=[0], target_modules=["q_proj"])


def test_only_changed_files_are_copies_and_the_record_tells_both(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """And what is there already is left alone, until the adapter changes or is left out."""
    source, lora = pair
    dest, changes = tmp_path / "dest", list[str]()
    plain = fetched(source, tmp_path / "plain", None)
    record = fetched(source, dest, lora, changes)
    assert json.loads((dest / RECORD_FILE).read_text()) == record
    (changed,) = record["adapter"]["base"]
    linked = {file.name for file in dest.glob("*.safetensors") if file.samefile(source / file.name)}
    assert linked == {file.name for file in source.glob("*.safetensors")} - {changed} != set()
    assert all(hash_file(dest / name) == entry["sha256"] for name, entry in record["files"].items())
    assert record["files"][changed] != plain["files"][changed]
    assert unmerged(record)["files"] == plain["files"] and "adapter" not in plain
    assert record["adapter"]["files"][WEIGHTS] == hash_file(lora / WEIGHTS)
    assert fetched(source, dest, lora, changes) == record and changes == ["changed"]
    (dest / changed).write_bytes(b"x")
    assert fetched(source, dest, lora, changes) == record and len(changes) == 2
    other = adapters.write_lora(source, tmp_path / "other", 7, layers_to_transform=[0], target_modules=["q_proj"])
    assert fetched(source, dest, other, changes)["files"] != record["files"] and len(changes) == 3
    assert fetched(source, dest, None, changes) == plain and len(changes) == 4
    assert (dest / changed).samefile(source / changed)


def test_other_code_merges_anew(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint and an adapter that stay the same do not tell whether the merged weights do."""
    source, lora = pair
    dest, changes = tmp_path / "dest", list[str]()
    first = fetched(source, dest, lora, changes)
    monkeypatch.setattr("shardmill.checkpoint.fetch.merge", lambda *_: None)
    second = fetched(source, dest, lora, changes)
    (name,) = first["adapter"]["base"]
    assert second == unmerged(first) != first and changes == ["changed", "changed"]
    assert hash_file(dest / name) == first["adapter"]["base"][name]


@pytest.mark.parametrize("beside", ["mtp.layers.0", "vision_tower.vision_model.encoder.layers.0"])
def test_an_adapter_of_the_decoder_needs_nothing_for_what_lies_beside_it(
    pair: tuple[Path, Path], beside: str, tmp_path: Path
) -> None:
    """An MTP head and a vision tower have projections of the same names, which transformers' decoder does not load."""
    source, _ = pair
    lora = adapters.write_lora(source, tmp_path / "whole", target_modules=["q_proj"])
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][f"{beside}.self_attn.q_proj.weight"] = "beside.safetensors"
    index.write_text(json.dumps(content))
    save_file({f"{beside}.self_attn.q_proj.weight": torch.zeros(4, 4)}, source / "beside.safetensors")
    record = fetched(source, tmp_path / "dest", lora)
    assert len(record["adapter"]["base"]) > 1 and "beside.safetensors" not in record["adapter"]["base"]


def test_what_can_not_be_merged_is_refused_and_nothing_lands(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, lora = pair
    tensors = load_file(lora / WEIGHTS)
    a, b = sorted(tensors)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    config = json.loads((lora / "adapter_config.json").read_text())

    def refused(changed: dict[str, torch.Tensor], **settings: Any) -> str:
        save_file(changed, lora / WEIGHTS)
        (lora / "adapter_config.json").write_text(json.dumps(config | settings))
        with pytest.raises(CheckpointError) as caught:
            fetched(source, tmp_path / "dest", lora)
        assert not (tmp_path / "dest").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    def under(module: str) -> dict[str, torch.Tensor]:
        return {name.replace(prefix, f"base_model.model.{module}"): one for name, one in tensors.items()}

    free = {"layers_to_transform": None}
    assert "lm_head, which is no weight of a layer" in refused(under("lm_head"), target_modules=["lm_head"], **free)
    gone = under("model.layers.9.self_attn.q_proj")
    assert "which is no weight of a layer" in refused(gone, layers_to_transform=[9])
    assert "the checkpoint's is BF16" in refused({a: tensors[a][:, 1:].contiguous(), b: tensors[b]})
    assert "not finite" in refused({a: tensors[a] * float("inf"), b: tensors[b]})
    assert "can't hold a merged weight" in refused({a: tensors[a] * 1e30, b: tensors[b] * 1e30})
    assert "target_modules has model.layers.1.self_attn.q_proj" in refused(tensors, **free)
    assert "use_dora" in refused(tensors, use_dora=True)
