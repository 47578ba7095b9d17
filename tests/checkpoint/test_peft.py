"""Adapters in PEFT's layout: read as PEFT reads them, and refused by name where programs can't follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file

from shardmill.checkpoint.peft import CONFIG, WEIGHTS, check_targets, read_lora
from shardmill.errors import CheckpointError

MODULES = [
    f"model.layers.{i}.{name}" for i in range(3) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
]


def write(folder: Path, modules: list[str], rank: int = 2, **settings: Any) -> Path:
    """A folder with an adapter of some modules; the settings go into its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"} | settings
    (folder / CONFIG).write_text(json.dumps(config))
    shapes = {"A": (rank, 8), "B": (6, rank)}
    save_file(
        {
            f"base_model.model.{name}.lora_{side}.weight": torch.ones(shape)
            for name in modules
            for side, shape in shapes.items()
        },
        folder / WEIGHTS,
    )
    return folder


TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "up_proj"]},
    {"target_modules": r"model\.layers\.[02]\..*_proj"},
    {"target_modules": ["model.layers.1.mlp.up_proj"]},
    {"target_modules": ["o_proj", "q_proj"], "exclude_modules": ["self_attn.o_proj"]},
    {"target_modules": ["o_proj", "q_proj"], "exclude_modules": r".*\.0\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
    {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
]


@pytest.mark.parametrize("settings", TARGETS, ids=str)
def test_targets_are_those_of_peft(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = LoraConfig(**settings)
    chosen = [name for name in MODULES if check_target_module_exists(config, name)]
    assert chosen
    lora = read_lora(write(tmp_path / "whole", chosen, **settings))
    assert set(lora.tensors) == set(chosen)
    check_targets(lora, MODULES)
    for module in MODULES:
        others = [name for name in chosen if name != module] if module in chosen else [*chosen, module]
        with pytest.raises(CheckpointError, match="no target of|has no matrices|no LoRA matrix|no such matrices"):
            check_targets(read_lora(write(tmp_path / module, others, **settings)), MODULES)


REFUSED: dict[str, dict[str, Any]] = {
    "peft_type is 'IA3'": {"peft_type": "IA3"},
    "use_dora is True": {"use_dora": True},
    "bias is 'all'": {"bias": "all"},
    "lora_bias is True": {"lora_bias": True},
    "modules_to_save is ['lm_head']": {"modules_to_save": ["lm_head"]},
    "target_parameters is ['mlp.experts']": {"target_parameters": ["mlp.experts"]},
    "layer_replication is [[0, 4]]": {"layer_replication": [[0, 4]]},
    "trainable_token_indices is [1]": {"trainable_token_indices": [1]},
    "fan_in_fan_out is True": {"fan_in_fan_out": True},
    "a_key_of_tomorrow is 1": {"a_key_of_tomorrow": 1},
    "init_lora_weights 'pissa'": {"init_lora_weights": "pissa"},
    "r is 0 and": {"r": 0},
    "r is True and": {"r": True},
    "lora_alpha nan": {"lora_alpha": float("nan")},
    "has matrices of rank 2 and 2": {"r": 3},
    "alpha_pattern is no map": {"alpha_pattern": {"q_proj": "4"}},
    "target_modules: ( is no pattern": {"target_modules": "("},
    "target_modules is neither": {"target_modules": None},
    "base_model_name_or_path is no name": {"base_model_name_or_path": 3},
    "is no target of": {"target_modules": ["v_proj"]},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_programs_can_not_follow_is_refused_by_name(tmp_path: Path, said: str) -> None:
    folder = write(tmp_path, [MODULES[0]])
    read_lora(folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | REFUSED[said]))
    with pytest.raises(CheckpointError) as refused:
        read_lora(folder)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_lora(tmp_path / "missing")
    folder = write(tmp_path / "cut", [MODULES[0]])
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        read_lora(folder)
    key = f"base_model.model.{MODULES[0]}.lora_A.weight"
    save_file({key: torch.ones(2, 8)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="lora_A alone"):
        read_lora(folder)
    save_file({key: torch.full((2, 8), torch.nan), key.replace("_A", "_B"): torch.ones(6, 2)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="is not finite"):
        read_lora(folder).read(MODULES[0])
    save_file({"base_model.model.lm_head.weight": torch.ones(2, 8)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="is no LoRA matrix"):
        read_lora(folder)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle checkpoint, .*convert it"):
        read_lora(folder)
    (folder / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_lora(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_every_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, key = write(tmp_path, [MODULES[0]]), f"base_model.model.{MODULES[0]}.lora_A.weight"
    a, b = torch.randn(2, 8).to(dtype), torch.randn(6, 2).to(dtype)
    save_file({key: a, key.replace("_A", "_B"): b}, folder / WEIGHTS)
    found = read_lora(folder).read(MODULES[0])
    assert torch.equal(torch.tensor(found.a), a.float())
    assert torch.equal(torch.tensor(found.b), b.float())
    assert found.scaling == 2.0
