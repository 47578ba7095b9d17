"""The config.json of each checkpoint that configs/ names, as published, by the name of the file in configs/.

What `published_configs.py` has is taken from there. Of the others, fields that decide nothing here are left out. Every
entry has its source, the repository that its file in configs/ names, and the published number of parameters of the
text model, so that a number that was written down wrongly shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .published_configs import EMBEDDING_GEMMA_2, FULL, LLAMA3, PUBLISHED, SLIDING, causal

Published = tuple[str, float, dict[str, Any]]  # the repository, billions of parameters, config.json
PHI_4_MINI = json.loads((Path(__file__).parents[2] / "resources/phi-4-mini/config.json").read_text())


def qwen3(*sizes: int) -> dict[str, Any]:
    """A Qwen3 of up to 1.7 billion parameters, whose head is tied."""
    return causal("Qwen3", "qwen3", sizes) | {"head_dim": 128, "rope_theta": 1000000, "tie_word_embeddings": True}


def qwen3_asr() -> dict[str, Any]:
    """Qwen3-ASR 0.6B as transformers has it: Qwen3 0.6B, and an encoder of 18 layers for sounds."""
    audio = {
        "model_type": "qwen3_asr_encoder",
        "d_model": 896,
        "downsample_hidden_size": 480,
        "encoder_attention_heads": 14,
        "encoder_ffn_dim": 3584,
        "encoder_layers": 18,
        "num_mel_bins": 128,
        "output_dim": 1024,
    }
    return {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "audio_config": audio,
        "audio_token_id": 151676,
        "text_config": qwen3(1024, 3072, 28, 16, 8, 151936, 65536),
        "tie_word_embeddings": True,
    }


SIGLIP_BASE_512 = {  # google/siglip-base-patch16-512, and SigLIP 2's of that size
    "hidden_size": 768,
    "image_size": 512,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 16,
}


def smolvlm2_500m() -> dict[str, Any]:
    """SmolVLM2 500M: SmolLM2 360M, whose head is not tied here, and a SigLIP."""
    text = causal("Llama", "llama", (960, 2560, 32, 15, 5, 49280, 8192)) | {"rope_theta": 100000, "head_dim": 64}
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": 49190,
        "scale_factor": 4,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": SIGLIP_BASE_512 | {"model_type": "smolvlm_vision"},
    }


def granite_docling() -> dict[str, Any]:
    """Granite Docling 258M: a Llama of 30 layers with IBM's vocabulary, and a SigLIP 2."""
    text = causal("Llama", "llama", (576, 1536, 30, 9, 3, 100352, 8192)) | {"rope_theta": 100000.0, "head_dim": 64}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": 100270,
        "scale_factor": 4,
        "text_config": text | {"tie_word_embeddings": True},
        "tie_word_embeddings": True,
        "vision_config": SIGLIP_BASE_512 | {"model_type": "idefics3_vision"},
    }


def lfm2_vl(text: dict[str, Any]) -> dict[str, Any]:
    """LFM2-VL 450M: LFM2 350M and a SigLIP 2 for pictures of any shape."""
    naflex = {name: value for name, value in SIGLIP_BASE_512.items() if name != "image_size"}
    return {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "downsample_factor": 2,
        "image_token_id": 396,
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 2560,
        "text_config": text,
        "vision_config": naflex | {"model_type": "siglip2_vision_model", "num_patches": 256, "vision_use_head": False},
    }


def gemma3(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """A Gemma 3 that reads text alone."""
    return causal("Gemma3", "gemma3_text", (hidden, ffn, layers, heads, kv_heads, 262144, 32768)) | {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "layer_types": [FULL if i % 6 == 5 else SLIDING for i in range(layers)],
        "tie_word_embeddings": True,
        **more,
    }


def gemma4(sizes: tuple[int, ...], sharing: int, period: int, **more: Any) -> dict[str, Any]:
    """A multimodal Gemma 4 with rows for each token and layer; the number of layers that share caches."""
    text = causal("Gemma4", "gemma4_text", sizes) | {
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": sharing,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "layer_types": [FULL if i % period == period - 1 else SLIDING for i in range(sizes[2])],
        "final_logit_softcapping": 30.0,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        **more,
    }
    return {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}


def gemma3_4b() -> dict[str, Any]:
    """A multimodal Gemma 3."""
    text = gemma3(2560, 10240, 34, 8, 4, sliding_window=1024, vocab_size=262208, max_position_embeddings=131072)
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text | rope}


OWN: dict[str, Published] = {
    "qwen2.5-coder-0.5b": (
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        0.494,
        causal("Qwen2", "qwen2", (896, 4864, 24, 14, 2, 151936, 32768))
        | {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    ),
    "phi-4-mini": ("microsoft/Phi-4-mini-instruct", 3.84, PHI_4_MINI),
    "phi-4-mini-all-systems": ("microsoft/Phi-4-mini-instruct", 3.84, PHI_4_MINI),
    "gemma-3-270m": ("google/gemma-3-270m", 0.268, gemma3(640, 2048, 18, 4, 1)),
    "gemma-3-4b": ("google/gemma-3-4b-it", 3.88, gemma3_4b()),
    "gemma-2-2b": (
        "google/gemma-2-2b-it",
        2.61,
        causal("Gemma2", "gemma2", (2304, 9216, 26, 8, 4, 256000, 8192))
        | {
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gemma-4-e2b": (
        "google/gemma-4-E2B-it",
        4.63,
        gemma4((1536, 6144, 35, 8, 1, 262144, 131072), 20, 5, use_double_wide_mlp=True),
    ),
    "gemma-4-e4b": ("google/gemma-4-E4B-it", 7.46, gemma4((2560, 10240, 42, 8, 2, 262144, 131072), 18, 6)),
    "granite-3.3-2b": (
        "ibm-granite/granite-3.3-2b-instruct",
        2.53,
        causal("Granite", "granite", (2048, 8192, 40, 32, 8, 49159, 131072))
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-3.0-1b-a400m": (
        "ibm-granite/granite-3.0-1b-a400m-instruct",
        1.33,
        causal("GraniteMoe", "granitemoe", (1024, 512, 24, 16, 8, 49155, 4096))
        | {
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "hy-mt1.5-1.8b": (
        "tencent/HY-MT1.5-1.8B",
        1.79,
        causal("HunYuanDenseV1", "hunyuan_v1_dense", (2048, 6144, 32, 16, 4, 120818, 262144))
        | {
            "head_dim": 128,
            "use_qk_norm": True,
            "rope_theta": 10000.0,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "rope_type": "dynamic", "type": "dynamic"},
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-350m": (
        "LiquidAI/LFM2-350M",
        0.354,
        causal("Lfm2", "lfm2", (1024, 6656, 16, 16, 8, 65536, 128000))
        | {
            "block_auto_adjust_ff_dim": True,
            "block_ff_dim": 6656,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "conv_bias": False,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
    ),
    # Numbers of parameters with the tower, as the hub counts each repository's tensors.
    "smolvlm2-500m": ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 0.507482304, smolvlm2_500m()),
    "granite-docling-258m": ("ibm-granite/granite-docling-258M", 0.257517120, granite_docling()),
    "lfm2-8b-a1b": (
        "LiquidAI/LFM2-8B-A1B",
        8.34,
        causal("Lfm2Moe", "lfm2_moe", (2048, 7168, 24, 32, 8, 65536, 128000))
        | {
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "layer_types": [FULL if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
            "norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
    ),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B-Instruct",
        1.236,
        causal("Llama", "llama", (2048, 8192, 16, 32, 8, 128256, 131072))
        | {
            "head_dim": 64,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3 | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
    ),
    "mistral-7b": (
        "mistralai/Mistral-7B-Instruct-v0.3",
        7.25,
        causal("Mistral", "mistral", (4096, 14336, 32, 32, 8, 32768, 32768))
        | {"rope_theta": 1e6, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        46.7,
        causal("Mixtral", "mixtral", (4096, 14336, 32, 32, 8, 32000, 32768))
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": None},
    ),
    "olmo-2-1b": (
        "allenai/OLMo-2-0425-1B-Instruct",
        1.485,
        causal("Olmo2", "olmo2", (2048, 8192, 16, 16, 16, 100352, 4096))
        | {"rope_theta": 500000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    ),
    "olmoe-1b-7b": (
        "allenai/OLMoE-1B-7B-0924-Instruct",
        6.92,
        causal("Olmoe", "olmoe", (2048, 1024, 16, 16, 16, 50304, 4096))
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "tie_word_embeddings": False},
    ),
    "phi-3.5-moe": (
        "microsoft/Phi-3.5-MoE-instruct",
        41.87,
        causal("Phimoe", "phimoe", (4096, 6400, 32, 32, 8, 32064, 131072))
        | {
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 64,
                "long_factor": [1.0] * 64,
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", 1.72, qwen3(2048, 6144, 28, 16, 8, 151936, 40960)),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        30.5,
        causal("Qwen3Moe", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936, 40960))
        | {
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": (
        "unsloth/gpt-oss-20b-BF16",
        20.9,
        causal("GptOss", "gpt_oss", (2880, 2880, 24, 64, 8, 201088, 131072))
        | {
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": [SLIDING, FULL] * 12,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    # The numbers are transformers' own defaults. Published are 8.3 billion parameters, without the embedding's 0.54.
    "zaya1-8b": ("Zyphra/ZAYA1-8B", 8.84, {"architectures": ["ZayaForCausalLM"], "model_type": "zaya"}),
    "smollm3-3b": (
        "HuggingFaceTB/SmolLM3-3B",
        3.08,
        causal("SmolLM3", "smollm3", (2048, 11008, 36, 16, 4, 128256, 65536))
        | {"rope_theta": 5000000.0, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "bge-small": (
        "BAAI/bge-small-en-v1.5",
        0.0332,  # without the pooler, which an embedding does not use
        causal("Bert", "bert", (384, 1536, 12, 12, 12, 30522, 512)) | {"architectures": ["BertModel"]},
    ),
    "modernbert-embed": (
        "nomic-ai/modernbert-embed-base",
        0.149,
        {
            "architectures": ["ModernBertModel"],
            "model_type": "modernbert",
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "vocab_size": 50368,
            "max_position_embeddings": 8192,
        },
    ),
    "qwen3-embedding-0.6b": ("Qwen/Qwen3-Embedding-0.6B", 0.596, qwen3(1024, 3072, 28, 16, 8, 151669, 32768)),
    "qwen3-reranker-0.6b": ("Qwen/Qwen3-Reranker-0.6B", 0.596, qwen3(1024, 3072, 28, 16, 8, 151669, 40960)),
    "embeddinggemma-300m": (
        "google/embeddinggemma-300m",
        0.303,
        gemma3(768, 1152, 24, 3, 1, use_bidirectional_attention=True, max_position_embeddings=2048)
        | {"architectures": ["Gemma3TextModel"]},
    ),
    "embeddinggemma-2": ("google/embeddinggemma-2", 0.271, EMBEDDING_GEMMA_2),
    "privacy-filter": (
        "openai/privacy-filter",
        1.4,
        json.loads((Path(__file__).parents[2] / "resources/privacy-filter/config.json").read_text()),
    ),
}
# A file in configs/ -> its repository and its name in PUBLISHED.
TAKEN = {
    "ministral-3-3b": ("mistralai/Ministral-3-3B-Instruct-2512-BF16", "Ministral-3-3B"),
    "olmo-3-7b": ("allenai/Olmo-3-7B-Instruct", "Olmo-3-7B"),
    "exaone-4.0-1.2b": ("LGAI-EXAONE/EXAONE-4.0-1.2B", "EXAONE-4.0-1.2B"),
    "glm-4-9b": ("zai-org/GLM-4-9B-0414", "GLM-4-9B-0414"),
    "apertus-8b": ("swiss-ai/Apertus-8B-Instruct-2509", "Apertus-8B-2509"),
    "granite-4.0-micro": ("ibm-granite/granite-4.0-micro", "granite-4.0-micro"),
    "granite-4.0-h-1b": ("ibm-granite/granite-4.0-h-1b", "granite-4.0-h-1b"),
    "granite-4.0-h-tiny": ("ibm-granite/granite-4.0-h-tiny", "granite-4.0-h-tiny"),
    "command-r7b": ("CohereLabs/c4ai-command-r7b-12-2024", "Command-R7B"),
    "ernie-4.5-0.3b": ("baidu/ERNIE-4.5-0.3B-PT", "ERNIE-4.5-0.3B"),
    "helium-1-2b": ("kyutai/helium-1-2b", "helium-1-2b"),
    "stablelm-2-1.6b": ("stabilityai/stablelm-2-zephyr-1_6b", "stablelm-2-1.6b"),
    "nemotron-3-nano-4b": ("nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", "Nemotron-3-Nano-4B"),
    "nemotron-mini-4b": ("nvidia/Nemotron-Mini-4B-Instruct", "Nemotron-Mini-4B"),
    "lfm2.5-1.2b": ("LiquidAI/LFM2.5-1.2B-Instruct", "LFM2.5-1.2B"),
    "minicpm5-2b": ("openbmb/MiniCPM5-2B", "MiniCPM5-2B"),
    "starcoder2-3b": ("bigcode/starcoder2-3b", "starcoder2-3b"),
    "recurrentgemma-2b": ("google/recurrentgemma-2b-it", "recurrentgemma-2b"),
    "qwen3.5-0.8b": ("Qwen/Qwen3.5-0.8B", "Qwen3.5-0.8B"),
    "qwen3.5-4b": ("Qwen/Qwen3.5-4B", "Qwen3.5-4B"),
    "qwen3.5-9b": ("Qwen/Qwen3.5-9B", "Qwen3.5-9B"),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B", "Qwen3.5-27B"),
    "qwen3.5-35b-a3b": ("Qwen/Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B"),
}
OWN["lfm2-vl-450m"] = ("LiquidAI/LFM2-VL-450M", 0.450822656, lfm2_vl(OWN["lfm2-350m"][2]))
# With its tower, a Qwen3.5 has more parameters than its text model has. The towers' widths are those that other
# projects write down for these sizes; the hub counts the MTP layer, too, so its number is no check of them.
for _name, _billions, _depth, _width in [("Qwen3.5-0.8B", 0.853, 12, 768), ("Qwen3.5-4B", 4.54, 24, 1024)]:
    _config = PUBLISHED[_name][1]
    _vision = {"depth": _depth, "hidden_size": _width, "intermediate_size": 4 * _width, "num_heads": _width // 64}
    _whole = _config | {"vision_config": _config["vision_config"] | _vision}
    OWN[f"{_name.lower()}-images"] = (f"Qwen/{_name}", _billions, _whole)
OWN["qwen3-asr-0.6b"] = ("Qwen/Qwen3-ASR-0.6B-hf", 0.782, qwen3_asr())
SHIPPED: dict[str, Published] = OWN | {file: (repo, *PUBLISHED[name]) for file, (repo, name) in TAKEN.items()}
