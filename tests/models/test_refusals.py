"""What no program can be is refused by the field of config.json that says so, before any work; towers are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shardmill import cli, config
from shardmill.checkpoint.cache import HashCache
from shardmill.errors import ShardmillError
from shardmill.pipeline.steps.split import split

from . import tiny_families
from .tiny_configs import MINISTRAL, tiny_config

INFINITE = {"__float__": "Infinity"}  # as transformers writes it
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another family": ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    "a frequency that changes": ("llama", {"rope_parameters": DYNAMIC}, "rope_parameters: .*rope_type 'dynamic'"),
    "dynamic without alpha": ("hunyuan_v1_dense", {"rope_parameters": DYNAMIC}, "rope_parameters: .*without alpha"),
    "a scaled table of part of each head": (
        "llama",
        {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5 beside rope_type 'llama3': transformers can't run that for llama",
    ),
    "such a table by the older names": (
        "mistral",
        {"rope_parameters": None, "rope_scaling": LINEAR, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5 beside rope_type 'linear'",
    ),
    "a window without a position": ("mistral", {"sliding_window": 0}, "sliding_window is 0: no token would see any"),
    "a window of less": ("mistral", {"sliding_window": -1}, "sliding_window is -1: no token would see any"),
    "another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu': programs have"),
    "Gemma's other activation": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu': programs have"),
    "an unknown number": ("llama", {"attention_gain": 0.5}, "attention_gain is 0.5: llama programs have no place"),
    "an unknown flag": ("qwen3", {"use_gate": True}, "use_gate is True: qwen3 programs have no place"),
    "another family's field": ("llama", {"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
    "quantised weights": (
        "llama",
        {"quantization_config": {"quant_method": "awq"}},
        "awq weights can't",
    ),
    "weights in MXFP4": ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 weights can't"),
    "no kinds of layers": ("lfm2_moe", {"layer_types": None}, "layer_types: missing in config.json"),
    "a field without a value": (
        "granitemoe",
        {"logits_scaling": None},
        "a field is null, .* granitemoe model's .TypeError",
    ),
    "layers without experts": ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
    "more experts than there are": ("mixtral", {"num_experts_per_tok": 13}, "num_experts_per_tok 13: there are 12"),
    "ZAYA's sliding layers": (
        "zaya",
        {"layer_types": ["hybrid_sliding"] * 3, "sliding_window": 8},
        "layer_types: .*hybrid_sliding",
    ),
    "PhiMoE beyond its original length": (
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 16,
                "long_factor": [2.0] * 16,
                "short_mscale": 1.0,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 32,
            }
        },
        "is over the original length",
    ),
    "SparseMixer of three": ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3: SparseMixer chooses 2"),
    "quantised weights around a tower": ("gemma3", {"quantization_config": {"bits": 4}}, "quantization_config: "),
    "a quantised tower": (
        "gemma3",
        {"text_config": {"model_type": "gemma3_text", "quantization_config": {"quant_method": "awq"}}},
        "awq weights can't be converted",
    ),
    "attention both ways": (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is True",
    ),
    "a cap that transformers does not apply": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping is 50.0: gemma3_text programs have no place",
    ),
    "biases of convolutions": ("lfm2", {"conv_bias": True}, "conv_bias is true"),
    "a layer of another type": (
        "gemma2",
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types: 'chunked_attention'",
    ),
    "more experts than there are beside an MLP": (
        "granitemoehybrid",
        {"num_local_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok 5: there are 4 experts",
    ),
    "Granite's other layers": (
        "granitemoehybrid",
        {"layer_types": ["linear_attention", "sliding_attention"] * 2},
        "layer_types: 'sliding_attention': programs have attention and Mamba-2 only",
    ),
    "biases of Mamba's projections": ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias is true"),
    "Mamba's other activation": (
        "granitemoehybrid",
        {"hidden_act": "gelu_pytorch_tanh"},
        "hidden_act is 'gelu_pytorch_tanh': programs have Mamba-2 with SiLU only",
    ),
    "an upper limit of steps": (
        "granitemoehybrid",
        {"time_step_limit": [0.0, 0.5]},
        "time_step_limit: 0.5 is an upper",
    ),
    "steps below 0": ("granitemoehybrid", {"time_step_limit": [-1.0, INFINITE]}, "the least step of Mamba-2 is -1"),
    "Mamba's groups": ("granitemoehybrid", {"mamba_n_groups": 3}, "16 heads of Mamba-2 are no multiple of 3 groups"),
    "more taps than Mamba has": ("granitemoehybrid", {"mamba_d_conv": 9}, "Mamba-2 has 9 taps: programs have 2 to 8"),
    "a Mamba state that the engine does not take": (
        "granitemoehybrid",
        {"mamba_d_state": 24},
        "state_dim 24: a recurrent state whose width is no multiple of 32 fails",
    ),
    "Granite's other norm": (
        "granitemoehybrid",
        {"normalization_function": "layernorm"},
        "normalization_function is 'layernorm': transformers computes a granitemoehybrid with 'rmsnorm'",
    ),
    "Nemotron-H with experts": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe"] * 3},
        "layers_block_type: 'moe': programs have linear_attention, full_attention, mlp only",
    ),
    "a tied Nemotron-H": ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    "Nemotron-H's other activation": (
        "nemotron_h",
        {"mamba_hidden_act": "gelu"},
        "mamba_hidden_act is 'gelu': programs have Mamba-2 with SiLU only",
    ),
    "Nemotron-H with biases": ("nemotron_h", {"use_bias": True}, "use_bias is True: nemotron_h programs have no place"),
    "Nemotron-H with a window": ("nemotron_h", {"sliding_window": 8}, "sliding_window is 8: nemotron_h programs have"),
    "Nemotron-H with a layer that drafts": (
        "nemotron_h",
        {"num_nextn_predict_layers": 2},
        "num_nextn_predict_layers is 2: nemotron_h programs have no place",
    ),
    "Nemotron-H's state in bf16": (
        "nemotron_h",
        {"mamba_ssm_cache_dtype": "bfloat16"},
        "mamba_ssm_cache_dtype is 'bfloat16'",
    ),
    "Nemotron-H's other limit of steps": (
        "nemotron_h",
        {"time_step_limit": [0.0, 0.5]},
        "time_step_limit is .0.0, 0.5.: transformers computes a nemotron_h with time_step_min",
    ),
    "queries that grow": (
        "ministral3",
        {"rope_parameters": MINISTRAL["rope_parameters"] | {"original_max_position_embeddings": 32}},
        "is over the original length 32: there llama_4_scaling_beta",
    ),
    "LayerNorm of heads": ("stablelm", {"qk_layernorm": True}, "qk_layernorm is true"),
    "an Apertus with a gate": ("apertus", {"hidden_act": "silu"}, "hidden_act 'silu': apertus programs have xielu"),
    "an Apertus with more norms": ("apertus", {"post_norm": True}, "post_norm is True: transformers computes .* False"),
    "xIELU elsewhere": ("llama", {"hidden_act": "xielu"}, "hidden_act 'xielu': programs have"),
    "Cohere's branches in turn": ("cohere2", {"use_parallel_block": False}, "use_parallel_block is False"),
    "Cohere's norms of heads": ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
    "Cohere's other layers": (
        "cohere2",
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types: 'chunked_attention'",
    ),
    "EXAONE's other layers": (
        "exaone4",
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types: 'chunked_attention'",
    ),
    "experts beside an MLP of Gemma 4": (
        "gemma4_text",
        {"enable_moe_block": True},
        "enable_moe_block is true: programs have no",
    ),
    "Gemma 4 both ways": (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention is 'all': a decoder's tokens see",
    ),
    "a second table of other tokens": (
        "gemma4_text",
        {"vocab_size_per_layer_input": 128},
        "vocab_size_per_layer_input: the second table has 128 tokens, the vocabulary has 256",
    ),
    "layers of Gemma 4 that differ in more than heads": (
        "gemma4_text",
        {"per_layer_config": {"1": {"sliding_window": 4}}},
        "per_layer_config: sliding_window: layers may differ in head_dim and num_key_value_heads only",
    ),
    "shared caches without a second table": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0},
        "hidden_size_per_layer_input is 0: transformers can't run",
    ),
    "a cache that no layer has": (
        "gemma4_text",
        {"num_kv_shared_layers": 6},
        "num_kv_shared_layers is 6: no earlier layer has the cache",
    ),
    "Gemma 2's second window": (
        "gemma2",
        {"sliding_window_size": 9},
        "sliding_window_size is 9: transformers computes",
    ),
    "a Llama's other activation": ("llama", {"activation": "geglu"}, "activation is 'geglu': transformers computes"),
    "Qwen3.5 without a gate": ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False"),
    "Qwen3.5's state in bf16": ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
    "Qwen3.5's other activation": (
        "qwen3_5_text",
        {"hidden_act": "gelu_pytorch_tanh"},
        "hidden_act is 'gelu_pytorch_tanh': programs have a DeltaNet with SiLU only",
    ),
    "Qwen3.5 with biases": ("qwen3_5_text", {"attention_bias": True}, "attention_bias is True"),
    "Qwen3.5's other gate": ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
    "Qwen3.5 with experts": (
        "qwen3_5_text",
        {"num_experts": 4},
        "num_experts is 4: .* no place",
    ),
    "Qwen3.5's value heads": (
        "qwen3_5_text",
        {"linear_num_value_heads": 10},
        "linear_num_value_heads 10 is no multiple of linear_num_key_heads 6",
    ),
    "more taps than a recurrence has": (
        "qwen3_5_text",
        {"linear_conv_kernel_dim": 9},
        "linear_conv_kernel_dim is 9: programs have 2 to 8 taps",
    ),
    "another layer of Qwen3.5": (
        "qwen3_5_text",
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types: 'chunked_attention'",
    ),
    "YaRN that changes in Qwen3.5": ("qwen3_5_text", {"rope_parameters": DYNAMIC}, "rope_parameters: .*'dynamic'"),
    "a recurrent state that the engine does not take": (
        "qwen3_5_text",
        {"linear_key_head_dim": 24},
        "linear_key_head_dim 24: a recurrent state whose width is no multiple of 32 fails",
    ),
    "an interleaved rotation": (
        "llama",
        {"rope_interleaved": True},
        "rope_interleaved is True: llama programs have no",
    ),
    "two numbers of experts": ("gpt_oss", {"experts_per_token": 4}, "experts_per_token is 4: transformers computes"),
    "Qwen3-Coder without norms of heads": ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm is False: transformers"),
    "a context that is too long": ("olmo2", {"max_position_embeddings": 32}, "context.* 32 positions"),
}


def write_config(model_type: str, folder: Path, changes: dict[str, Any]) -> Path:
    """A checkpoint's folder that holds a changed config.json and nothing else."""
    folder.mkdir()
    content = json.loads(tiny_config(model_type).to_json_string(use_diff=False)) | changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_plan_refuses_it_in_one_line(tmp_path: Path, name: str) -> None:
    model_type, changes, message = REFUSED[name]
    source = write_config(model_type, tmp_path / "checkpoint", changes)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings(source)))
    said = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "a.yaml")])
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("shardmill: ") and said.stderr.count("\n") == 1
    assert re.search(message, said.stderr)


@pytest.mark.parametrize("name", REFUSED)
def test_split_refuses_it_before_it_reads_a_tensor(tmp_path: Path, name: str) -> None:
    """There is none here, so a later refusal would be about that."""
    model_type, changes, message = REFUSED[name]
    source = write_config(model_type, tmp_path / "checkpoint", {})
    chosen = config.parse(settings(source))
    source = write_config(model_type, tmp_path / "fetched", changes)
    with pytest.raises(ShardmillError, match=message) as caught:
        split(source, chosen, HashCache(tmp_path / "hashes"), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe", "zaya"])
def test_a_pass_that_a_convolution_s_ring_does_not_hold_is_refused(tmp_path: Path, model_type: str) -> None:
    """By plan, before the workflow begins, and by the split; one token less is held, and other models have no ring."""
    source = write_config(model_type, tmp_path / "checkpoint", {})
    message = (
        r"tokens\.max: 31 is too many for a pass over convolutions of 3 taps, whose ring has 32 slots; 30 or fewer"
    )
    for most in (30, 31):
        wanted = settings(source) | {"tokens": {"max": most}}
        (tmp_path / f"{most}.yaml").write_text(yaml.safe_dump(wanted))
        said = CliRunner().invoke(cli.app, ["plan", str(tmp_path / f"{most}.yaml"), "--json"])
        assert "tokens.max" not in said.stderr if most == 30 else re.search(message, said.stderr)
        assert said.stderr.count("\n") <= 1
    with pytest.raises(ShardmillError, match=message):
        split(source, config.parse(wanted), HashCache(tmp_path / "hashes"), {})
    other = config.parse(settings(write_config("llama", tmp_path / "llama", {})) | {"tokens": {"max": 64}})
    with pytest.raises(ShardmillError) as caught:  # as there is no tensor
        split(tmp_path / "llama", other, HashCache(tmp_path / "hashes"), {})
    assert "tokens.max" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "tokens", "shapes", "message"),
    [
        (
            "qwen3_5_text",
            {"max": 16},
            "range",
            r"tokens\.max: 16 is too many: one .* takes 8 .*, or add `program.shapes: fixed`",
        ),
        ("qwen3_5_text", {"max": 60}, "fixed", r"tokens\.max: a recurrence takes prompts in blocks of 8; 56 would fit"),
        (
            "qwen3_5_text",
            {"max": 16, "verify": 9},
            "fixed",
            r"tokens\.verify: 9 is too many for a recurrence: 8 of its",
        ),
        ("nemotron_h", {"max": 16}, "range", r"tokens\.max: 16 is too many: one .*, or add `program.shapes: fixed`"),
        ("granitemoehybrid", {"max": 12}, "fixed", r"a recurrence takes prompts in blocks of 8; 8 would fit"),
    ],
)
def test_a_pass_that_a_recurrence_does_not_fold_is_refused(
    model_type: str, tokens: dict[str, int], shapes: str, message: str, tmp_path: Path
) -> None:
    """By the plan, and by the split."""
    source = write_config(model_type, tmp_path / "checkpoint", {})
    wanted = settings(source) | {"tokens": tokens, "program": {"shapes": shapes}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(wanted))
    said = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "config.yaml"), "--json"])
    assert re.search(message, said.stderr) and said.stderr.count("\n") == 1
    with pytest.raises(ShardmillError, match=message):
        split(source, config.parse(wanted), HashCache(tmp_path / "hashes"), {})


def settings(source: Path) -> dict[str, Any]:
    """A config that leaves open what it can."""
    return tiny.settings(str(source), topology="auto", head={"slices": 1})


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_tower_of_a_wrapped_gemma_3_is_that_of_gemma_3_text(tmp_path: Path, prefix: str) -> None:
    """Whichever way its tensors are called; the other tensors are left alone, and plan has no fault to find."""
    alone = tiny_families.write_tiny("gemma3_text", tmp_path / "alone")
    tensors = {name: t for file in sorted(alone.glob("*.safetensors")) for name, t in load_file(file).items()}
    wrapped = write_config("gemma3", tmp_path / "wrapped", {})
    moved = {prefix + name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"}
    vision = {f"{name}.weight": torch.zeros(3, 3) for name in ("vision_tower.layer", "multi_modal_projector.norm")}
    save_file(moved | vision, wrapped / "model.safetensors", metadata={"format": "pt"})
    (wrapped / "tokenizer.json").write_bytes((alone / "tokenizer.json").read_bytes())
    contents = [[part.content for part in parts_of(folder, tmp_path)] for folder in (alone, wrapped)]
    assert contents[0] == contents[1]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings(wrapped)))
    said = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "a.yaml"), "--json"])
    assert (said.exit_code, json.loads(said.stdout)["tensors"]) == (0, "match"), said.stderr


def parts_of(checkpoint: Path, folder: Path) -> Any:
    """What split makes of a checkpoint."""
    source = tiny.fetched(checkpoint, folder / f"{checkpoint.name}-source")
    files = json.loads((source / "source.json").read_text())["files"]
    return split(source, config.parse(settings(source)), HashCache(folder / "hashes"), files)[0]


@pytest.mark.parametrize(("name", "value"), [("beta", 0.25), ("eps", -0.5), ("eps", -1.1e-6)])
def test_an_apertus_with_another_fixed_number_is_refused(tmp_path: Path, name: str, value: float) -> None:
    """Programs have beta and eps as constants of their graph, and the checkpoint holds both for each layer."""
    checkpoint, tensor = (
        tiny_families.write_tiny("apertus", tmp_path / "checkpoint"),
        f"model.layers.1.mlp.act_fn.{name}",
    )
    assert parts_of(checkpoint, tmp_path)
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {key: torch.full_like(t, value) for key, t in tensors.items() if key == tensor}
        save_file(tensors | changed, file, metadata={"format": "pt"})
    (tmp_path / "again").mkdir()
    with pytest.raises(ShardmillError, match=rf"tensor {tensor} is {value}: programs have .* in its place"):
        parts_of(checkpoint, tmp_path / "again")


@pytest.mark.parametrize("then", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_apertus_may_have_been_saved_in_fp16(tmp_path: Path, then: torch.dtype) -> None:
    """Where its eps is one of fp16's smallest numbers, and off by a hundredth."""
    checkpoint = tiny_families.write_tiny("apertus", tmp_path / "checkpoint")
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({key: t.half().to(then) for key, t in tensors.items()}, file, metadata={"format": "pt"})
        if eps := [t.item() for key, t in tensors.items() if key.endswith("act_fn.eps")]:
            assert torch.tensor(eps).half().to(then).float().sub(-1e-6).abs().min() > 2.0**-7 * 1e-6
    assert parts_of(checkpoint, tmp_path)


def test_zaya_s_old_layout_is_refused_with_the_repository_that_has_the_new_one(tmp_path: Path) -> None:
    source = tiny.fetched(tiny_families.write_tiny("zaya", tmp_path / "old"), tmp_path / "source")
    save_file({"model.layers.0.self_attn.qkv.linear_q.weight": torch.zeros(2, 2)}, source / "extra.safetensors")
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.self_attn.qkv.linear_q.weight"] = "extra.safetensors"
    index.write_text(json.dumps(content))
    files = json.loads((source / "source.json").read_text())["files"]
    settings = config.parse(tiny.settings(str(source), topology="auto", head={"slices": 1}))
    with pytest.raises(ShardmillError, match=r"qkv\.linear_q\.weight: .* take Zyphra/ZAYA1-8B"):
        split(source, settings, HashCache(tmp_path / "hashes"), files)
