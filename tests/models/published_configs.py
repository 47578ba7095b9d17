"""Configs as their authors publish them, with every field that transformers ignores, and the published sizes.

Fields that decide nothing here (tokens' numbers, dropout, versions) are left out where other entries have them.
"""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def causal(name: str, model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A decoder's config; the sizes are hidden, intermediate, layers, heads, key/value heads, vocabulary, positions."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    found = dict(zip((*names, "vocab_size", "max_position_embeddings"), sizes, strict=True))
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        **found,
        **more,
    }


def ministral(hidden: int, ffn: int, layers: int, tied: bool) -> dict[str, Any]:
    """A multimodal Ministral 3."""
    rope = {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    text = causal("Ministral3", "ministral3", (hidden, ffn, layers, 32, 8, 131072, 262144)) | {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
    }
    vision = {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": vision | {"head_dim": 64, "intermediate_size": 4096, "image_size": 1540, "patch_size": 14},
        "vision_feature_layer": -1,
    }


def qwen3_5(sizes: tuple[int, ...], value_heads: int, tied: bool) -> dict[str, Any]:
    """A multimodal Qwen3.5; only the outer config says whether the head is tied."""
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    text = causal("Qwen3_5", "qwen3_5_text", sizes) | {
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", FULL] * (sizes[2] // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 248056,
        "text_config": text,
        "tie_word_embeddings": tied,
        "vision_config": {"model_type": "qwen3_5", "depth": 12, "hidden_size": 768, "out_hidden_size": sizes[0]},
    }


def qwen3_5_moe(sizes: tuple[int, ...], value_heads: int) -> dict[str, Any]:
    """A multimodal Qwen3.5 with experts."""
    found = qwen3_5(sizes, value_heads, tied=False)
    text = found["text_config"] | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    }
    del text["intermediate_size"]
    return found | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": found["vision_config"] | {"model_type": "qwen3_5_moe"},
    }


def granite(sizes: tuple[int, ...], mamba_heads: int, multipliers: tuple[float, float, float], **more: Any) -> Any:
    """A Granite 4; the multipliers are attention's, the residual's, and the logits' divisor."""
    attention, residual, logits = multipliers
    mamba = {"chunk_size": 256, "conv_bias": True, "d_conv": 4, "d_head": "auto", "d_state": 256, "expand": 2}
    mamba |= {"n_groups": 1, "n_heads": mamba_heads, "proj_bias": False}
    return causal("GraniteMoeHybrid", "granitemoehybrid", sizes) | {
        "shared_intermediate_size": sizes[1],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["attention"] * sizes[2],
        "position_embedding_type": "rope",
        "embedding_multiplier": 12.0,
        "residual_multiplier": residual,
        "attention_multiplier": attention,
        "logits_scaling": logits,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "init_method": "mup",
        "initializer_range": 0.1,
        "normalization_function": "rmsnorm",
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "use_cache": True,
        **{f"mamba_{name}": value for name, value in mamba.items()},
        **more,
    }


def cohere(sizes: tuple[int, ...], scale: float, **more: Any) -> dict[str, Any]:
    """A Command R7B or Tiny Aya."""
    return causal("Cohere2", "cohere2", sizes) | {
        "head_dim": 128,
        "rope_theta": 50000,
        "rope_scaling": None,
        "rotary_pct": 1,
        "layer_norm_eps": 1e-5,
        "logit_scale": scale,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "attention_bias": False,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "use_qk_norm": False,
        "cache_implementation": "hybrid",
        **more,
    }


def nemotron_h(sizes: tuple[int, ...], heads: tuple[int, int], pattern: str, **more: Any) -> dict[str, Any]:
    """A dense Nemotron-H; the heads are Mamba-2's and their width."""
    return causal("NemotronH", "nemotron_h", sizes) | {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 128,
        "hybrid_override_pattern": pattern,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": heads[1],
        "mamba_hidden_act": "silu",
        "mamba_num_heads": heads[0],
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_groups": 8,
        "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rms_norm_eps": 1e-5,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "time_step_floor": 1e-4,
        "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "use_bias": False,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        **more,
    }


def granite_h(attention: tuple[int, ...], layers: int, head: int) -> dict[str, Any]:
    """What a Granite 4 with Mamba-2 layers has, but for attention on some layers; the width of a Mamba-2 head."""
    types = ["attention" if i in attention else "mamba" for i in range(layers)]
    return {"layer_types": types, "position_embedding_type": "nope", "mamba_d_head": head, "mamba_d_state": 128}


RECURRENT_GEMMA = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "model_type": "recurrent_gemma",
    "torch_dtype": "bfloat16",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "num_hidden_layers": 26,
    "num_attention_heads": 10,
    "num_key_value_heads": 1,
    "vocab_size": 256000,
    "attention_bias": False,
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "final_w_init_variance_scale": 0.07692307692307693,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "logits_soft_cap": 30.0,
    "lru_width": 2560,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "w_init_variance_scale": 0.01,
}


# Name -> the number of parameters of its text model, in billions, and the config.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Ministral-3-3B": (3.43, ministral(3072, 9216, 26, True)),
    "Ministral-3-8B": (8.49, ministral(4096, 14336, 34, False)),
    "Olmo-3-7B": (
        7.30,
        causal("Olmo3", "olmo3", (4096, 11008, 32, 32, 32, 100278, 65536))
        | {
            "rope_theta": 500000,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
    ),
    "EXAONE-4.0-1.2B": (
        1.28,
        causal("Exaone4", "exaone4", (2048, 4096, 30, 32, 8, 102400, 65536))
        | {
            "head_dim": 64,
            "rope_theta": 1000000,
            "rope_scaling": LLAMA3 | {"factor": 16.0},
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": [FULL] * 30,
            "tie_word_embeddings": True,
        },
    ),
    "GLM-4-9B-0414": (
        9.40,
        causal("Glm4", "glm4", (4096, 13696, 40, 32, 2, 151552, 32768))
        | {"head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "attention_bias": True},
    ),
    "Apertus-8B-2509": (
        8.05,
        causal("Apertus", "apertus", (4096, 21504, 32, 32, 8, 131072, 65536))
        | {
            "hidden_act": "xielu",
            "hidden_dropout": 0.0,
            "mlp_bias": False,
            "post_norm": False,
            "qk_norm": True,
            "rope_theta": 12000000,
            "rope_scaling": LLAMA3 | {"type": "llama3"},
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "granite-4.0-350m": (0.352, granite((1024, 2048, 28, 16, 4, 100352, 32768), 64, (0.015625, 0.263, 4.0))),
    "granite-4.0-1b": (1.63, granite((2048, 4096, 40, 16, 4, 100352, 131072), 128, (0.0078125, 0.22, 8.0))),
    "granite-4.0-micro": (3.40, granite((2560, 8192, 40, 40, 8, 100352, 131072), 128, (0.015625, 0.22, 10.0))),
    "granite-4.0-h-350m": (
        0.340,
        granite(
            (768, 2048, 32, 12, 4, 100352, 32768),
            48,
            (0.015625, 0.246, 3.0),
            **granite_h((10, 13, 17, 27), 32, 32),
        ),
    ),
    "granite-4.0-h-1b": (
        1.46,
        granite(
            (1536, 4096, 40, 12, 4, 100352, 131072),
            48,
            (0.0078125, 0.22, 6.0),
            **granite_h((5, 15, 25, 35), 40, 64),
        ),
    ),
    "granite-4.0-h-tiny": (
        6.94,
        granite(
            (1536, 512, 40, 12, 4, 100352, 131072),
            48,
            (0.0078125, 0.22, 6.0),
            **granite_h((5, 15, 25, 35), 40, 64),
            num_local_experts=64,
            num_experts_per_tok=6,
            shared_intermediate_size=1024,
        ),
    ),
    "SmolLM2-135M": (
        0.1345,
        causal("Llama", "llama", (576, 1536, 30, 9, 3, 49152, 8192))
        | {
            "attention_bias": False,
            "head_dim": 64,
            "is_llama_config": True,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
        },
    ),
    "gemma-2-9b-it": (
        9.24,
        causal("Gemma2", "gemma2", (3584, 14336, 42, 16, 8, 256000, 8192))
        | {
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
        },
    ),
    "Qwen3.5-0.8B": (0.752, qwen3_5((1024, 3584, 24, 8, 2, 248320, 262144), 16, tied=True)),
    "Qwen3.5-4B": (4.21, qwen3_5((2560, 9216, 32, 16, 4, 248320, 262144), 32, tied=True)),
    "Qwen3.5-27B": (26.9, qwen3_5((5120, 17408, 64, 24, 4, 248320, 262144), 48, tied=False)),
    "Qwen3.5-9B": (8.95, qwen3_5((4096, 12288, 32, 16, 4, 248320, 262144), 32, tied=False)),
    "Qwen3.5-35B-A3B": (34.66, qwen3_5_moe((2048, 0, 40, 16, 2, 248320, 262144), 32)),
    "LFM2.5-1.2B": (
        1.17,
        causal("Lfm2", "lfm2", (2048, 12288, 16, 32, 8, 65536, 128000))
        | {
            "block_auto_adjust_ff_dim": True,
            "block_dim": 2048,
            "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0,
            "block_mlp_init_scale": 1.0,
            "block_multiple_of": 256,
            "block_norm_eps": 1e-5,
            "block_out_init_scale": 1.0,
            "block_use_swiglu": True,
            "block_use_xavier_init": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": 2048,
            "conv_dim_out": 2048,
            "conv_use_xavier_init": True,
            "layer_types": ["conv", "conv", FULL] * 3 + ["conv", FULL] * 3 + ["conv"],
            "norm_eps": 1e-5,
            "num_heads": 32,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "tie_embedding": True,
            "tie_word_embeddings": True,
            "use_pos_enc": True,
        },
    ),
    "MiniCPM5-2B": (
        2.51675648,
        causal("Llama", "llama", (2048, 6144, 42, 16, 2, 130560, 131072))
        | {"head_dim": 128, "rope_theta": 5000000.0, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ),
    "tiny-aya-3.35B": (
        3.35,
        cohere((2048, 11008, 36, 16, 4, 262144, 500000), 1.0, layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 9),
    ),
    "Command-R7B": (8.03, cohere((4096, 14336, 32, 32, 8, 256000, 8192), 0.25)),
    "ERNIE-4.5-0.3B": (
        0.361,
        causal("Ernie4_5_", "ernie4_5", (1024, 3072, 18, 16, 2, 103424, 131072))
        | {"head_dim": 128, "rope_theta": 500000, "use_bias": False, "tie_word_embeddings": True},
    ),
    "stablelm-2-1.6b": (
        1.64,
        causal("StableLm", "stablelm", (2048, 5632, 24, 32, 32, 100352, 4096))
        | {"partial_rotary_factor": 0.25, "rope_theta": 10000, "layer_norm_eps": 1e-5, "use_qkv_bias": True},
    ),
    "starcoder2-3b": (
        3.03,
        causal("Starcoder2", "starcoder2", (3072, 12288, 30, 24, 2, 49152, 16384))
        | {"norm_epsilon": 1e-5, "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True}
        | {"hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0.1, "embedding_dropout": 0.1}
        | {"residual_dropout": 0.1, "tie_word_embeddings": True},
    ),
    "recurrentgemma-2b": (2.68, RECURRENT_GEMMA),
    "Nemotron-Mini-4B": (
        4.19,
        causal("Nemotron", "nemotron", (3072, 9216, 32, 24, 8, 256000, 4096))
        | {"head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10000, "norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    "Nemotron-H-8B": (
        8.1,
        nemotron_h(
            (4096, 21504, 52, 32, 8, 131072, 8192),
            (128, 64),
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            attention_head_dim=128,
        ),
    ),
    "Nemotron-Nano-9B-v2": (
        8.89,
        nemotron_h(
            (4480, 15680, 56, 40, 8, 131072, 131072),
            (128, 80),
            "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        ),
    ),
    "Nemotron-3-Nano-4B": (
        3.97,
        nemotron_h(
            (3136, 12544, 42, 40, 8, 131072, 262144),
            (96, 80),
            "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
            chunk_size=256,
        ),
    ),
    "helium-1-2b": (
        1.89,
        causal("Helium", "helium", (2048, 8192, 28, 16, 8, 64000, 4096))
        | {
            "head_dim": 128,
            "rope_theta": 20000.0,
            "rms_norm_eps": 1e-8,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    ),
}

# google/embeddinggemma-2, whose other towers are no concern here; its text model has 271 million numbers.
EMBEDDING_GEMMA_2: dict[str, Any] = {
    "architectures": ["EmbeddingGemma2Model"],
    "audio_config": {"model_type": "gemma4_audio"},
    "model_type": "embedding_gemma2",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "embedding_dim": 768,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 512,
        "hidden_size_per_layer_input": 512,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "layer_types": [*[SLIDING] * 5, FULL] * 4,
        "max_position_embeddings": 262144,
        "model_type": "embedding_gemma2_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "per_layer_config": {layer: {"head_dim": 512, "num_key_value_heads": 1} for layer in ("05", "11", "17", "23")},
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            FULL: {"rope_theta": 1000000.0, "rope_type": "default"},
            SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "vision_config": {"model_type": "gemma4_vision"},
}
