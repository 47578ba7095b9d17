"""Synthetic checkpoints are what transformers expects, the same for the same seed, and behave like a model."""

import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.small_configs import FAMILIES, small_config
from models.tiny_configs import TINY
from shardmill_lab import synthetic
from shardmill_lab.synthetic import draw_rows, write_synthetic_checkpoint
from transformers import AutoModelForCausalLM

from shardmill.checkpoint.hashing import scan_checkpoint, tree_hash
from shardmill.checkpoint.headers import read_tensors
from shardmill.errors import CheckpointError
from shardmill.gates.reference import checkpoint_weights
from shardmill.models.architecture import TensorSource
from shardmill.models.hf_config import load_hf_config

CONFIG: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 32,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("synthetic") / "model"
    write_synthetic_checkpoint(CONFIG, dest, seed=1, max_file_bytes=2_000_000)
    return dest


@pytest.fixture(scope="module")
def run(folder: Path) -> Any:
    """transformers' answer to 64 tokens, with the residual stream after every layer."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model(torch.arange(64)[None], output_hidden_states=True)


def test_transformers_loads_it_and_stays_finite(run: Any) -> None:
    """Every tensor has the name and shape that transformers wants, and 32 layers neither vanish nor explode."""
    stream = torch.stack(run.hidden_states[1:-1])  # [layers - 1, 1, T, hidden], before the final norm
    assert torch.isfinite(run.logits).all() and 0.05 < run.logits.std() < 20
    assert stream.abs().max() < 1000 and stream[-1].std() > stream[0].std() / 10


def test_outlier_channels(run: Any) -> None:
    """A few channels of the residual stream are several times larger than the rest, and always the same ones."""
    for index in (1, 16, 31):
        size = run.hidden_states[index][0].std(dim=0)  # [hidden]
        loud = (size > 3 * size.median()).nonzero().flatten().tolist()
        assert loud == synthetic._loud_channels(96, 1).tolist()


def test_files_are_split_like_the_hubs(folder: Path) -> None:
    """Files stay under the limit, their names count them, and the index adds up their bytes."""
    files = sorted(folder.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 2 and all(f.stat().st_size < 2_100_000 for f in files)
    tensors = read_tensors(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.end - t.start for t in tensors.values())
    assert scan_checkpoint(folder, tensors).tensors.keys() == tensors.keys()


def test_seed_decides_the_bytes_and_threads_do_not(folder: Path, tmp_path: Path) -> None:
    write_synthetic_checkpoint(CONFIG, tmp_path / "same", seed=1, max_file_bytes=2_000_000, threads=1)
    write_synthetic_checkpoint(CONFIG, tmp_path / "other", seed=2, max_file_bytes=2_000_000)
    assert tree_hash(tmp_path / "same") == tree_hash(folder) != tree_hash(tmp_path / "other")


def test_blocks_join_seamlessly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is written to its own rows: the file holds what was drawn, for every block of every tensor."""
    monkeypatch.setattr(synthetic, "BLOCK_ELEMENTS", 96 * 10)
    config = CONFIG | {"num_hidden_layers": 1}
    write_synthetic_checkpoint(config, tmp_path / "m", seed=3)
    tensors = read_tensors(tmp_path / "m")
    for recipe in synthetic._recipes(config):
        info = tensors[recipe.name]
        assert info.shape == recipe.shape
        raw = (tmp_path / "m" / info.file).read_bytes()[info.start : info.end]
        written = np.frombuffer(raw, "<u2").reshape(-1, recipe.columns)
        for _, first, last in synthetic._blocks(recipe):
            assert np.array_equal(written[first:last], draw_rows(recipe, first, last, seed=3))


def test_values_follow_the_recipe() -> None:
    """bf16 bits decode to the mean and deviation asked for, and neighbouring blocks are not copies."""
    recipe = synthetic._recipe("layers.0.mlp.gate_proj.weight", TensorSource("w"), (4096, 256), 256, 1, 0.02)
    block = draw_rows(recipe, 0, 4096, seed=0)
    quiet = np.delete(block, synthetic._loud_channels(256, 0), axis=1)
    values = (quiet.astype(np.uint32) << 16).view(np.float32)
    assert abs(values.mean()) < 1e-3 and abs(values.std() * 16 - 1) < 0.01
    assert not np.array_equal(block[:100], draw_rows(recipe, 4096, 4196, seed=0))


@pytest.mark.parametrize("saved", [float("inf"), {"__float__": "Infinity"}])
def test_an_infinity_stays_one_however_it_is_saved(saved: Any, tmp_path: Path) -> None:
    """As every Granite 4 H has it on the hub, and as transformers saves it."""
    config = small_config("granitemoehybrid").to_dict() | {"time_step_limit": [0.0, saved]}
    write_synthetic_checkpoint(config, tmp_path / "m", seed=1)
    assert load_hf_config(tmp_path / "m").time_step_limit == (0.0, float("inf"))


def test_a_number_that_is_spelt_wrongly_is_refused(tmp_path: Path) -> None:
    config = small_config("granitemoehybrid").to_dict() | {"time_step_limit": [0.0, {"__float__": "endless"}]}
    with pytest.raises(CheckpointError, match="__float__ is 'endless', no number; correct it"):
        write_synthetic_checkpoint(config, tmp_path / "m", seed=1)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_kind_of_constant_has_a_recipe(model_type: str, tmp_path: Path) -> None:
    """Biases, taps of convolutions, gains of 1 + weight: transformers finds every tensor, and its answer is sound."""
    write_synthetic_checkpoint(small_config(model_type).to_dict(), tmp_path / "m", seed=1)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        out = model(torch.arange(64)[None], output_hidden_states=True)
    assert out.logits.isfinite().all() and 0.001 < out.logits.std() < 20
    assert torch.stack(out.hidden_states[1:-1]).abs().max() < 1000


def test_a_gain_of_one_plus_weight_is_drawn_around_zero(tmp_path: Path) -> None:
    write_synthetic_checkpoint(small_config("gemma3_text").to_dict(), tmp_path / "m", seed=1)
    weights = checkpoint_weights(tmp_path / "m")
    for name in ("input_layernorm", "post_feedforward_layernorm", "self_attn.q_norm"):
        assert abs(weights(f"model.layers.0.{name}.weight").float().median()) < 0.1


def test_untied_head_is_written(tmp_path: Path) -> None:
    write_synthetic_checkpoint(CONFIG | {"tie_word_embeddings": False, "num_hidden_layers": 1}, tmp_path / "m", seed=0)
    assert read_tensors(tmp_path / "m")["lm_head.weight"].shape == (512, 96)
    assert "lm_head.weight" not in {r.name for r in synthetic._recipes(CONFIG)}


def test_tokenizer_is_copied_and_nothing_else(tmp_path: Path) -> None:
    """Of the folder that lends its tokenizer, neither the weights nor the config come along."""
    lender = tmp_path / "lender"
    lender.mkdir()
    for name in ("tokenizer.json", "config.json", "model.safetensors", "model.safetensors.index.json", "x.py"):
        (lender / name).write_text("{}")
    write_synthetic_checkpoint(CONFIG | {"num_hidden_layers": 1}, tmp_path / "m", seed=0, tokenizer=lender)
    names = {p.name for p in (tmp_path / "m").iterdir()}
    assert "tokenizer.json" in names and "x.py" not in names and "model.safetensors" not in names
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "phi3"
    assert len(read_tensors(tmp_path / "m")) == 8


def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    """Peak memory is that of a few blocks, for 2 layers as for 16; with more threads it would depend on their luck."""
    peaks = []
    for layers in (2, 16):
        tracemalloc.start()
        config = CONFIG | {"num_hidden_layers": layers, "hidden_size": 384, "intermediate_size": 1024}
        write_synthetic_checkpoint(config, tmp_path / str(layers), seed=0, threads=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be written is said in one line before anything is written."""
    with pytest.raises(CheckpointError, match="model_type 'gpt2' is not supported"):
        write_synthetic_checkpoint(CONFIG | {"model_type": "gpt2"}, tmp_path / "m", seed=0)
    with pytest.raises(CheckpointError, match="hidden_size"):
        write_synthetic_checkpoint({"model_type": "phi3"}, tmp_path / "m", seed=0)
    with pytest.raises(CheckpointError, match="is there already"):
        write_synthetic_checkpoint(CONFIG, tmp_path, seed=0)
    with pytest.raises(CheckpointError, match="absent: no such folder"):
        write_synthetic_checkpoint(CONFIG, tmp_path / "m", seed=0, tokenizer=tmp_path / "absent")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="disk full"):
        write_synthetic_checkpoint(CONFIG, tmp_path / "m", seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("experts", [4, 48])
def test_what_experts_write_is_scaled_down_by_depth_whatever_the_layout(experts: int, tmp_path: Path) -> None:
    """Each of a few layers would otherwise drown what came before it, and one rounding would change all after it."""
    content = {**TINY["gpt_oss"], "num_local_experts": experts, "num_hidden_layers": 2, "model_type": "gpt_oss"}
    write_synthetic_checkpoint(content, tmp_path / "ck", 0)
    weights = checkpoint_weights(tmp_path / "ck")
    down, up = (weights(f"model.layers.0.mlp.experts.{name}").float() for name in ("down_proj", "gate_up_proj"))
    assert float(down.std()) == pytest.approx(synthetic.HUSHED / math.sqrt(4 * down.shape[-1]), rel=0.05)
    assert float(up.std()) == pytest.approx(1 / math.sqrt(up.shape[-1]), rel=0.05)
