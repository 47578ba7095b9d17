"""A tiny config for every family: windows are shorter than the texts, and layers of all kinds occur."""

from __future__ import annotations

from typing import Any

VOCAB, WINDOW = 256, 8
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.125,
}
WIDE = {"hidden_size": 128}  # where heads share the hidden width: the Neural Engine wants heads of 32 and more
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + 0.05 * i for i in range(12)],
    "long_factor": [1 + 0.5 * i for i in range(12)],
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-3,  # large enough to show
}
GEMMA3 = GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
# Sliding and full layers whose cache nobody else reads, the sources of the layers that share, and such layers.
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-3,
    "global_head_dim": 64,
    "num_key_value_heads": 1,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding", "full")]
    + ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
# Keys that are values, fewer heads for them in full layers, and neither a second table nor shared caches.
UNIFIED = {
    **{name: value for name, value in GEMMA.items() if name != "query_pre_attn_scalar"},
    "layer_types": GEMMA3["layer_types"][:3] + ["full_attention"],
    "global_head_dim": 64,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
MIXED = {
    "head_dim": 32,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}
MINISTRAL: dict[str, Any] = {
    "head_dim": 32,
    "rope_parameters": YARN
    | {
        "factor": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,  # queries grow from there on
        "llama_4_scaling_beta": 0.1,
    },
}
# Two value heads for each key head, of other sizes; twelve and more, since shorter vectors are not in the weight file.
QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "rms_norm_eps": 1e-3,  # large enough to show
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "attn_output_gate": True,
    "tie_word_embeddings": True,
}
# Heads in groups; twelve and more, since shorter vectors are not in the weight file; and a least step that occurs.
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "time_step_limit": (0.05, float("inf")),
    "rms_norm_eps": 1e-3,  # large enough to show
}
QWEN3_5_MOE = QWEN3_5 | {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}
QWEN3_5_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

# Ten experts and heads or more: smaller vectors are not kept in a weight file.
EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 12}
BESIDE = EXPERTS | {"intermediate_size": 48}  # of a granitemoehybrid with experts beside its MLP

TINY: dict[str, dict[str, Any]] = {
    "apertus": BASE | WIDE | {"rope_parameters": LLAMA3},
    "cohere2": BASE
    | WIDE
    | {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_norm_eps": 1e-3, "logit_scale": 0.25},
    "ernie4_5": BASE | {"head_dim": 32, "use_bias": True},
    "exaone4": BASE
    | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3,
    },
    "gemma2": BASE | GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": {"text_config": BASE | GEMMA3, "vision_config": VISION},
    "gemma3_text": BASE | GEMMA3,
    "gemma4": {"text_config": BASE | GEMMA4},
    "gemma4_text": BASE | GEMMA4,
    "gemma4_unified": {"text_config": BASE | UNIFIED},
    "gemma4_unified_text": BASE | UNIFIED,
    "glm4": BASE | {"head_dim": 32, "attention_bias": True, "rms_norm_eps": 1e-3},
    "gpt_oss": BASE
    | EXPERTS
    | {
        "num_attention_heads": 12,
        "head_dim": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": YARN,
    },
    "granite": BASE
    | WIDE
    | {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    "granitemoe": BASE
    | WIDE
    | EXPERTS
    | {
        "intermediate_size": 48,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": BASE
    | WIDE
    | {
        "num_local_experts": 0,
        "shared_intermediate_size": 80,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "nope",
        **MAMBA,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    "helium": BASE | WIDE | {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": BASE
    | {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        "tie_word_embeddings": True,
    },
    "lfm2": BASE
    | WIDE
    | {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_ff_dim": 144,
        "block_multiple_of": 32,
    },
    "lfm2_vl": {
        "text_config": BASE
        | WIDE
        | {
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_ff_dim": 144,
            "block_multiple_of": 32,
        },
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "projector_hidden_size": 48,
        "image_token_id": 250,
    },
    "lfm2_moe": BASE
    | WIDE
    | {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
    },
    "llama": BASE
    | {
        "head_dim": 32,
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "ministral3": BASE | MINISTRAL,
    "mistral": BASE | {"head_dim": 32, "sliding_window": WINDOW},
    "mistral3": {
        "text_config": BASE | MINISTRAL | {"model_type": "ministral3"},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "mixtral": BASE | WIDE | EXPERTS | {"intermediate_size": 48, "sliding_window": WINDOW},
    "nemotron": BASE | {"head_dim": 32, "norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True},
    "nemotron_h": BASE
    | {
        "num_hidden_layers": 6,
        "layers_block_type": [
            *("linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention", "mlp"),
        ],
        "head_dim": 32,
        "mamba_num_heads": 16,
        "mamba_head_dim": 8,
        "ssm_state_size": 32,
        "n_groups": 4,
        "time_step_min": 0.05,
        "layer_norm_epsilon": 1e-3,
        "mlp_bias": True,
    },
    "olmo2": BASE | WIDE,
    "olmo3": BASE
    | WIDE
    | {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "full_attention": YARN | {"factor": 8.0, "attention_factor": 1.2079441541679836},
            "sliding_attention": {"rope_type": "default", "rope_theta": 150000.0},
        },
    },
    "olmoe": BASE | WIDE | {"intermediate_size": 48, "num_experts": 12, "num_experts_per_tok": 3},
    "phi3": BASE
    | WIDE
    | {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 128,
        "rope_parameters": LONGROPE,
        "sliding_window": None,
    },
    "phimoe": BASE
    | WIDE
    | {
        "intermediate_size": 48,
        "num_experts_per_tok": 2,
        "num_local_experts": 12,
        "router_jitter_noise": 0.2,  # large enough for experts to come close
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "qwen2": BASE | WIDE | {"tie_word_embeddings": True},
    "qwen3": BASE | MIXED,
    "qwen3_moe": BASE
    | {
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 80,  # so many that they share projections
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "qwen3_5_moe": {"text_config": BASE | QWEN3_5_MOE, "vision_config": QWEN3_5_VISION, "tie_word_embeddings": True},
    "qwen3_5_moe_text": BASE | QWEN3_5_MOE,
    "qwen3_5": {"text_config": BASE | QWEN3_5, "vision_config": QWEN3_5_VISION, "tie_word_embeddings": True},
    "qwen3_5_text": BASE | QWEN3_5,
    "recurrent_gemma": BASE
    | WIDE
    | {
        "num_hidden_layers": 4,
        "block_types": ["recurrent", "recurrent", "attention"],
        "attention_window_size": WINDOW,
        "lru_width": 96,
        "logits_soft_cap": 3.0,
        "rms_norm_eps": 1e-3,  # large enough to show
    },
    "seed_oss": BASE | {"head_dim": 32},
    "smolvlm": {
        "text_config": BASE | {"model_type": "llama", "head_dim": 32},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "scale_factor": 2,
        "image_token_id": 250,
    },
    "idefics3": {
        "text_config": BASE | {"model_type": "llama", "head_dim": 32},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "scale_factor": 2,
        "image_token_id": 250,
    },
    "qwen3_asr": {
        "text_config": BASE | {"model_type": "qwen3", "head_dim": 32},
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "output_dim": 64,
            "downsample_hidden_size": 4,
        },
        "tie_word_embeddings": True,
        "audio_token_id": 250,
    },
    "smollm3": BASE | WIDE | {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "stablelm": BASE | WIDE | {"use_qkv_bias": True, "layer_norm_eps": 1e-3},
    "starcoder2": BASE | WIDE | {"sliding_window": WINDOW, "norm_epsilon": 1e-3},
    "zaya": BASE
    | {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 12,
        "router_hidden_size": 16,
        "tie_word_embeddings": True,
        "layer_types": ["hybrid"] * 3,
    },
}


OUTER = ("tie_word_embeddings", "vision_config", "image_token_id", "audio_config", "audio_token_id")  # of its config


def tiny_config(model_type: str, **changes: Any) -> Any:
    """transformers' config of a family's tiny model; the changes go into its text tower where it has one."""
    from transformers import AutoConfig

    content = TINY[model_type]
    if "text_config" in content:
        outer = {name: value for name, value in changes.items() if name in OUTER}
        inner = {name: value for name, value in changes.items() if name not in OUTER or name == "tie_word_embeddings"}
        content = content | outer | {"text_config": content["text_config"] | inner}  # the outer one decides there
    else:
        content = content | changes
    return AutoConfig.for_model(model_type, **content)
