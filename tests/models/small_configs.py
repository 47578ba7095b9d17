"""Small configs of several families, each with what sets its layers or its constants apart."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22},
    "olmo2": {},
    "phi3": {"num_hidden_layers": 2, "sliding_window": 8},
    "gemma2": {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "apertus": {},
    "cohere2": {"sliding_window": 8, "attention_bias": True, "tie_word_embeddings": True},
    "ernie4_5": {"head_dim": 32, "use_bias": True, "tie_word_embeddings": True},
    "exaone4": {"head_dim": 32, "sliding_window": 8},
    "glm4": {"head_dim": 32},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "shared_intermediate_size": 80,
        "layer_types": ["full_attention"] * 4,
        "mamba_n_heads": 8,
        "time_step_limit": (0.0, float("inf")),
    },
    "helium": {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "ministral3": {"head_dim": 32},
    "nemotron": {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "olmo3": {"sliding_window": 8},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
}


def small_config(model_type: str, **changes: Any) -> Any:
    """transformers' config of a small model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**SIZES, **FAMILIES[model_type], **changes})
