"""Families over many of their configs: sizes, biases, windows, layer kinds and rotary tables drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import limits
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.models import supported

from . import tiny_families as tiny
from .tiny_configs import LLAMA3, MINISTRAL

EXAMPLES, TEXT = 15, 24
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (6, 3))
SHARED_WIDTH = {  # families without head_dim in their config
    *("apertus", "cohere2", "granite", "granitemoe", "granitemoehybrid", "lfm2", "lfm2_moe", "mixtral", "olmo2"),
    *("olmo3", "olmoe", "phi3", "phimoe", "qwen2", "smollm3", "stablelm"),
}
WINDOWS = st.sampled_from([1, 2, 5, 23, 24, tiny.SLOTS, 100])
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPES = st.sampled_from(
    [
        PLAIN_ROPE,
        PLAIN_ROPE | {"rope_type": "linear", "factor": 4.0},
        PLAIN_ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        LLAMA3,
    ]
)
Draw = Callable[[st.SearchStrategy[Any]], Any]


def layer_types(draw: Draw, layers: int, *names: str) -> list[str]:
    """A type for each layer."""
    found: list[str] = draw(st.lists(st.sampled_from(names), min_size=layers, max_size=layers))
    return found


def llama(draw: Draw, layers: int) -> dict[str, Any]:
    """Biases and rotary types."""
    return {"rope_parameters": draw(ROPES), "attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}


def mistral(draw: Draw, layers: int) -> dict[str, Any]:
    """A window for all layers, or none."""
    return {"sliding_window": draw(st.none() | WINDOWS), "rope_parameters": draw(ROPES)}


def qwen2(draw: Draw, layers: int) -> dict[str, Any]:
    """A window for some layers, or none."""
    if not draw(st.booleans()):
        return {"use_sliding_window": False, "layer_types": None, "rope_parameters": draw(ROPES)}
    types = layer_types(draw, layers, "full_attention", "sliding_attention")
    return {"use_sliding_window": True, "sliding_window": draw(WINDOWS), "layer_types": types}


def qwen3(draw: Draw, layers: int) -> dict[str, Any]:
    """Qwen 2's, and biases or none."""
    return qwen2(draw, layers) | {"attention_bias": draw(st.booleans())}


def smollm3(draw: Draw, layers: int) -> dict[str, Any]:
    """Any layers without rotary embedding, beside any windows."""
    turning = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    return qwen3(draw, layers) | {"mlp_bias": draw(st.booleans()), "no_rope_layers": turning}


def olmo2(draw: Draw, layers: int) -> dict[str, Any]:
    """Biases and rotary types."""
    return {"attention_bias": draw(st.booleans()), "rope_parameters": draw(ROPES)}


def granite(draw: Draw, layers: int) -> dict[str, Any]:
    """The four multipliers."""
    return llama(draw, layers) | {
        "embedding_multiplier": draw(st.sampled_from([1.0, 12.0])),
        "attention_multiplier": draw(st.sampled_from([0.015625, 0.1, 1.0])),
        "residual_multiplier": draw(st.sampled_from([0.22, 1.0])),
        "logits_scaling": draw(st.sampled_from([1.0, 6.0, 8.0])),
    }


def gemma2(draw: Draw, layers: int) -> dict[str, Any]:
    """Caps, the attention scale, windows."""
    return {
        "layer_types": layer_types(draw, layers, "full_attention", "sliding_attention"),
        "sliding_window": draw(WINDOWS),
        "query_pre_attn_scalar": draw(st.sampled_from([8, 24, 256])),
        "attn_logit_softcapping": draw(st.sampled_from([None, 2.0, 50.0])),
        "final_logit_softcapping": draw(st.sampled_from([None, 3.0, 30.0])),
        "attention_bias": draw(st.booleans()),
    }


def gemma3_text(draw: Draw, layers: int) -> dict[str, Any]:
    """Gemma 2's but for the cap of scores, and a rotary table for each type of layer."""
    full = PLAIN_ROPE | {"rope_theta": 1e6}
    tables = {"full_attention": draw(st.sampled_from([full, full | {"rope_type": "linear", "factor": 8.0}]))}
    uncapped = gemma2(draw, layers) | {"attn_logit_softcapping": None}
    return uncapped | {"rope_parameters": tables | {"sliding_attention": PLAIN_ROPE}}


def gemma3(draw: Draw, layers: int) -> dict[str, Any]:
    """The same without the cap of logits, which the model with a vision tower leaves out and its text tower applies."""
    return gemma3_text(draw, layers) | {"final_logit_softcapping": None}


def hunyuan(draw: Draw, layers: int) -> dict[str, Any]:
    """Frequencies by alpha, or plain ones."""
    by_alpha = PLAIN_ROPE | {"rope_type": "dynamic", "factor": 1.0, "alpha": draw(st.sampled_from([2.0, 1000.0]))}
    return {"rope_parameters": draw(st.sampled_from([PLAIN_ROPE, by_alpha])), "attention_bias": draw(st.booleans())}


def lfm2(draw: Draw, layers: int) -> dict[str, Any]:
    """Any order of convolutions and attention, with any number of taps."""
    return {
        "layer_types": layer_types(draw, layers, "conv", "full_attention"),
        "conv_L_cache": draw(st.integers(2, 5)),
        "block_auto_adjust_ff_dim": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
    }


def phi3(draw: Draw, layers: int) -> dict[str, Any]:
    """Partial rotation and a window."""
    share = draw(st.sampled_from([0.25, 0.5, 1.0]))
    parameters = PLAIN_ROPE | {"partial_rotary_factor": share}
    return {"rope_parameters": parameters, "sliding_window": draw(st.none() | WINDOWS)}


def experts(draw: Draw, count: str = "num_local_experts") -> dict[str, Any]:
    """Any number of experts, and of those that a token takes."""
    number = draw(st.sampled_from([1, 2, 7, 12]))
    return {count: number, "num_experts_per_tok": draw(st.integers(1, number))}


def mixtral(draw: Draw, layers: int) -> dict[str, Any]:
    """A window for all layers or none, and experts; transformers' YaRN wants a head_dim, which the config lacks."""
    return {"sliding_window": draw(st.none() | WINDOWS)} | experts(draw)


def olmoe(draw: Draw, layers: int) -> dict[str, Any]:
    """OLMo 2's, and experts."""
    return olmo2(draw, layers) | experts(draw, "num_experts") | {"norm_topk_prob": draw(st.booleans())}


def qwen3_moe(draw: Draw, layers: int) -> dict[str, Any]:
    """Experts that have projections of their own, or share them, and a window for all layers or none."""
    window = draw(st.none() | WINDOWS)
    found = {"num_experts": draw(st.sampled_from([3, 34, 48])), "num_experts_per_tok": draw(st.integers(1, 3))}
    return found | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "norm_topk_prob": draw(st.booleans()),
    }


def granitemoe(draw: Draw, layers: int) -> dict[str, Any]:
    """Granite's, and experts."""
    found = granite(draw, layers) | experts(draw)
    del found["mlp_bias"]
    return found


def lfm2_moe(draw: Draw, layers: int) -> dict[str, Any]:
    """LFM2's, and experts in the last layers."""
    return {
        "layer_types": layer_types(draw, layers, "conv", "full_attention"),
        "norm_topk_prob": draw(st.booleans()),
        "num_dense_layers": draw(st.integers(0, layers)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "use_expert_bias": draw(st.booleans()),
        **experts(draw, "num_experts"),
    }


def phimoe(draw: Draw, layers: int) -> dict[str, Any]:
    """Biases, a window, and how close experts must come."""
    return {
        "attention_bias": draw(st.booleans()),
        "lm_head_bias": draw(st.booleans()),
        "num_local_experts": draw(st.sampled_from([2, 7, 12])),
        "router_jitter_noise": draw(st.sampled_from([0.01, 0.2])),
        "sliding_window": draw(st.none() | WINDOWS),
        "tie_word_embeddings": False,
    }


def gpt_oss(draw: Draw, layers: int) -> dict[str, Any]:
    """Windows, experts, and their clamp."""
    return {
        "layer_types": layer_types(draw, layers, "full_attention", "sliding_attention"),
        "sliding_window": draw(WINDOWS),
        "swiglu_limit": draw(st.sampled_from([0.5, 7.0])),
        **experts(draw),
    }


def zaya(draw: Draw, layers: int) -> dict[str, Any]:
    """Experts and the width of the router."""
    heads, kv_heads = draw(st.sampled_from([(2, 2), (4, 2), (8, 4)]))
    return {
        "layer_types": ["hybrid"] * layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts": draw(st.sampled_from([2, 12])),
        "router_hidden_size": draw(st.sampled_from([8, 16])),
    }


def ministral3(draw: Draw, layers: int) -> dict[str, Any]:
    """A window for all layers or none, and YaRN up to its original length."""
    changed = {"factor": draw(st.sampled_from([2.0, 16.0])), "original_max_position_embeddings": tiny.SLOTS}
    parameters = MINISTRAL["rope_parameters"] | changed
    return {"sliding_window": draw(st.none() | WINDOWS), "rope_parameters": parameters}


def olmo3(draw: Draw, layers: int) -> dict[str, Any]:
    """Windows, and a rotary table for each type of layer."""
    return {
        "layer_types": layer_types(draw, layers, "full_attention", "sliding_attention"),
        "sliding_window": draw(WINDOWS),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": {"full_attention": draw(ROPES), "sliding_attention": PLAIN_ROPE},
    }


def exaone4(draw: Draw, layers: int) -> dict[str, Any]:
    """Windows, beside which full layers do not turn; or no window, and every layer turns."""
    if draw(st.booleans()):
        types = ["full_attention"] * layers
        return {"layer_types": types, "sliding_window": None, "rope_parameters": draw(ROPES)}
    types = layer_types(draw, layers, "full_attention", "sliding_attention")
    return {"layer_types": types, "sliding_window": draw(WINDOWS), "rope_parameters": draw(ROPES)}


def glm4(draw: Draw, layers: int) -> dict[str, Any]:
    """Partial rotation and biases."""
    share = draw(st.sampled_from([0.25, 0.5, 1.0]))
    return {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": share}, "attention_bias": draw(st.booleans())}


def ernie4_5(draw: Draw, layers: int) -> dict[str, Any]:
    """Biases and rotary types."""
    return {"rope_parameters": draw(ROPES), "use_bias": draw(st.booleans())}


def helium(draw: Draw, layers: int) -> dict[str, Any]:
    """Llama's, and heads that are as wide together as the stream, which transformers takes for granted."""
    heads, width = draw(st.sampled_from([(2, 8), (4, 32)]))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": width, "hidden_size": heads * width}
    return llama(draw, layers) | sizes


def cohere2(draw: Draw, layers: int) -> dict[str, Any]:
    """Windows, biases, and the scale of logits."""
    return {
        "layer_types": layer_types(draw, layers, "full_attention", "sliding_attention"),
        "sliding_window": draw(WINDOWS),
        "attention_bias": draw(st.booleans()),
        "layer_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "logit_scale": draw(st.sampled_from([0.0625, 1.0])),
    }


def stablelm(draw: Draw, layers: int) -> dict[str, Any]:
    """Branches in turn or beside each other, partial rotation, and biases."""
    share = draw(st.sampled_from([0.25, 0.5, 1.0]))
    return {
        "use_parallel_residual": draw(st.booleans()),
        "use_qkv_bias": draw(st.booleans()),
        "layer_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": share},
    }


def nemotron(draw: Draw, layers: int) -> dict[str, Any]:
    """Partial rotation, biases, and one of several activations."""
    found = glm4(draw, layers) | {"mlp_bias": draw(st.booleans()), "norm_eps": draw(st.sampled_from([1e-6, 1e-2]))}
    return found | {"hidden_act": draw(st.sampled_from(["relu2", "silu", "gelu_pytorch_tanh"]))}


def granitemoehybrid(draw: Draw, layers: int) -> dict[str, Any]:
    """Granite's, with a rotation or without; any order of layers; Mamba-2 of many sizes, in groups or not."""
    found = granite(draw, layers)
    del found["mlp_bias"]
    return found | {
        "layer_types": layer_types(draw, layers, "linear_attention", "full_attention"),
        "mamba_n_heads": 8,  # a divisor of every width, times 2
        "mamba_d_head": "auto",
        "mamba_d_state": draw(st.sampled_from([8, 32])),
        "mamba_n_groups": draw(st.sampled_from([1, 2, 8])),
        "mamba_d_conv": draw(st.integers(2, 8)),
        "mamba_conv_bias": draw(st.booleans()),
        "time_step_limit": (draw(st.sampled_from([0.0, 0.05])), float("inf")),
        "position_embedding_type": draw(st.sampled_from(["rope", "nope", None])),
        "shared_intermediate_size": draw(st.sampled_from([32, 100])),
        **(experts(draw) if draw(st.booleans()) else {}),
    }


def nemotron_h(draw: Draw, layers: int) -> dict[str, Any]:
    """Any order of layers of one branch, and Mamba-2 of many sizes; never tied."""
    eps = draw(st.sampled_from([1e-6, 1e-2]))
    return {
        "layers_block_type": layer_types(draw, layers, "linear_attention", "full_attention", "mlp"),
        "mamba_num_heads": 8,
        "mamba_head_dim": draw(st.sampled_from([2, 8])),
        "ssm_state_size": draw(st.sampled_from([8, 32])),
        "n_groups": draw(st.sampled_from([1, 2, 8])),
        "conv_kernel": draw(st.integers(2, 8)),
        "use_conv_bias": draw(st.booleans()),
        "time_step_min": draw(st.sampled_from([0.001, 0.05])),
        "mlp_bias": draw(st.booleans()),
        "mlp_hidden_act": draw(st.sampled_from(["relu2", "silu"])),
        "layer_norm_epsilon": eps,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
    }


def gemma4_text(draw: Draw, layers: int) -> dict[str, Any]:
    """Any order of layers; the last ones may share caches; rows of a second table or not; keys as values."""
    layers = draw(st.integers(2, 6))
    types = [*layer_types(draw, layers - 1, "sliding_attention", "full_attention"), "full_attention"]
    shares = draw(st.integers(0, layers - 1))
    own, last = types[: layers - shares], types[layers - shares :]
    shares = shares if shares and set(own) == set(types) and last else 0  # transformers wants sources of all types
    return gemma4_unified_text(draw, layers) | {
        "num_hidden_layers": layers,
        "layer_types": types,
        "num_kv_shared_layers": shares,
        "use_double_wide_mlp": draw(st.booleans()),
        "hidden_size_per_layer_input": 16 if shares else draw(st.sampled_from([0, 16])),
    }


def gemma4_unified_text(draw: Draw, layers: int) -> dict[str, Any]:
    """Heads of two widths, windows, a cap, biases, and keys that are values; the last layer is a full one."""
    types = [*layer_types(draw, layers - 1, "sliding_attention", "full_attention"), "full_attention"]
    return {
        "layer_types": types,
        "global_head_dim": draw(st.sampled_from([16, 64])),
        "sliding_window": draw(WINDOWS),
        "attention_k_eq_v": draw(st.booleans()),
        "num_global_key_value_heads": draw(st.sampled_from([None, 1])),
        "final_logit_softcapping": draw(st.sampled_from([None, 3.0])),
        "attention_bias": draw(st.booleans()),
    }


def qwen3_5(draw: Draw, layers: int) -> dict[str, Any]:
    """Any order of layers; heads of many sizes, in groups or not, and any number of taps."""
    share, group = draw(st.sampled_from([0.25, 0.5])), draw(st.integers(1, 3))
    keys = draw(st.sampled_from([1, 2, 6]))
    return {
        "layer_types": layer_types(draw, layers, "linear_attention", "full_attention"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * group,
        "linear_key_head_dim": draw(st.sampled_from([8, 32])),
        "linear_value_head_dim": draw(st.sampled_from([8, 64])),
        "linear_conv_kernel_dim": draw(st.integers(2, 8)),
        "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": share},
    }


def qwen3_5_moe(draw: Draw, layers: int) -> dict[str, Any]:
    """Qwen3.5's layers, and experts that have projections of their own, or share them, beside an MLP of any width."""
    found = {"num_experts": draw(st.sampled_from([3, 34, 48])), "num_experts_per_tok": draw(st.integers(1, 3))}
    widths = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": draw(st.sampled_from([8, 48]))}
    return qwen3_5(draw, layers) | found | widths


OWN: Mapping[str, Callable[[Draw, int], dict[str, Any]]] = {
    "apertus": olmo2,
    "cohere2": cohere2,
    "ernie4_5": ernie4_5,
    "exaone4": exaone4,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3_text,
    "gemma4": gemma4_text,
    "gemma4_text": gemma4_text,
    "gemma4_unified": gemma4_unified_text,
    "gemma4_unified_text": gemma4_unified_text,
    "glm4": glm4,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "granitemoe": granitemoe,
    "granitemoehybrid": granitemoehybrid,
    "helium": helium,
    "hunyuan_v1_dense": hunyuan,
    "idefics3": llama,
    "lfm2": lfm2,
    "lfm2_vl": lfm2,
    "lfm2_moe": lfm2_moe,
    "llama": llama,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral3": ministral3,
    "mixtral": mixtral,
    "nemotron": nemotron,
    "nemotron_h": nemotron_h,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "phi3": phi3,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_asr": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
    "smolvlm": llama,
    "stablelm": stablelm,
    "zaya": zaya,
}


@st.composite
def changes(draw: Draw, model_type: str) -> dict[str, Any]:
    """What differs from a family's tiny config; of a family without an entry in OWN, the sizes alone."""
    layers = draw(st.integers(1, 4))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    width = draw(st.sampled_from([8, 16, 32]))
    shared = model_type in SHARED_WIDTH
    own = OWN.get(model_type, lambda *_: {})(draw, layers)
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * width if shared else draw(st.sampled_from([48, 96])),
        "intermediate_size": draw(st.sampled_from([32, 100])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        **({} if shared else {"head_dim": width}),
        **own,
    }


@pytest.mark.thorough(but=["llama", "gemma3_text", "lfm2", "mixtral", "nemotron_h"])
@pytest.mark.parametrize("model_type", supported())
def test_any_config_of_a_family_computes_what_transformers_computes(model_type: str) -> None:
    """With rejected drafts in every text."""

    @settings(max_examples=EXAMPLES)
    @given(changes(model_type))
    def check(found: dict[str, Any]) -> None:
        model, tokens = tiny.tiny_model(model_type, **found), tiny.tiny_text(TEXT)
        engine = tiny.Blocks(tiny.described(model), tiny.tensors_of(model))
        limit = tiny.limit_of(model, tokens)
        limits.agrees(model_type, tiny.error_of(engine, tokens, tiny.expected(model, tokens)), limit)

    check()
