"""Tiny random models of transformers' architectures, with inputs for their forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How a tiny model is made.

    Attributes:
        model: its class: of transformers, or module and class in transformers.models.
        config: its config's class, likewise.
        settings: of the config.
        inputs: makes the arguments of its forward.
        constants: inputs that are frozen, since a program of fixed shapes can't depend on them.
        dead: why its output says nothing, if it doesn't.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Callable[[], Inputs]
    constants: tuple[str, ...] = ()

    def build(self) -> tuple[nn.Module, Inputs]:
        """Return the model, whose vectors of zeros have other values, and inputs."""
        torch.manual_seed(0)
        settings = {name: value() if callable(value) else value for name, value in self.settings.items()}
        model = _named(self.model)(_named(self.config)(**settings)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1 and not weight.any():
                    weight.normal_(0, 0.05)
        return model, self.inputs()


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}") if module else transformers, name)


def tokens(count: int = 16) -> Inputs:
    return {"input_ids": torch.randint(5, 90, (1, count)), "attention_mask": torch.ones(1, count, dtype=torch.long)}


def tokens_alone() -> Inputs:
    return {"input_ids": tokens()["input_ids"]}


def decoded() -> Inputs:
    return {**tokens(), "use_cache": False}


def image(side: int = 64) -> Inputs:
    return {"pixel_values": torch.rand(1, 3, side, side)}


def sound() -> Inputs:
    return {"input_values": torch.randn(1, 8000)}


def mel(frames: int = 200, bands: int = 80) -> Inputs:
    return {"input_features": torch.rand(1, bands, frames)}


def frames_of(count: int, width: int, name: str = "input_features") -> Callable[[], Inputs]:
    return lambda: {name: torch.rand(1, count, width)}


def patches(count: int, width: int) -> Callable[[], Inputs]:
    return lambda: {"hidden_states": torch.rand(count, width), "grid_thw": torch.tensor([[1, 8, 8]])}


def answered(source: Callable[[], Inputs]) -> Callable[[], Inputs]:
    """Inputs of an encoder and a decoder in one pass."""
    return lambda: {**source(), "decoder_input_ids": tokens(8)["input_ids"], "use_cache": False}


def backbone(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: _named(name)(**settings)


BODY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {**BODY, "vocab_size": 100, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LLM = {**TEXT, **ENDS, "num_key_value_heads": 2}
VISION = {**BODY, "image_size": 64, "patch_size": 16}
SPEECH = {**BODY, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
SMALL = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
BOTH = {**SMALL, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
WHISPER = {**BOTH, **ENDS, "vocab_size": 100, "num_mel_bins": 80, "max_source_positions": 100, "pad_token_id": 0}
MIXED = {**LLM, "head_dim": 16, "num_experts_per_tok": 2}
TOWER = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64}
T5 = {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
SIZES = {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 1, 1]}


def _of(
    stem: str, settings: Mapping[str, Any], inputs: Callable[[], Inputs], head: str = "Model", **more: Any
) -> Architecture:
    return Architecture(f"{stem}{head}", f"{stem}Config", settings, inputs, **more)


TEXTS = {
    "bert": _of("Bert", TEXT, tokens),
    "distilbert": _of(
        "DistilBert", {"vocab_size": 100, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}, tokens
    ),
    "roberta": _of("Roberta", TEXT, tokens),
    "xlm_roberta": _of("XLMRoberta", TEXT, tokens),
    "camembert": _of("Camembert", TEXT, tokens),
    "data2vec_text": _of("Data2VecText", TEXT, tokens),
    "electra": _of("Electra", TEXT, tokens),
    "albert": _of("Albert", {**TEXT, "embedding_size": 32}, tokens),
    "ernie": _of("Ernie", TEXT, tokens),
    "megatron_bert": _of("MegatronBert", TEXT, tokens),
    "rembert": _of("RemBert", {**TEXT, "input_embedding_size": 32, "output_embedding_size": 32}, tokens),
    "layoutlm": _of("LayoutLM", TEXT, tokens),
    "splinter": _of("Splinter", TEXT, tokens),
    "deberta": _of("Deberta", {**TEXT, **RELATIVE}, tokens),
    "deberta_v2": _of("DebertaV2", {**TEXT, **RELATIVE}, tokens),
    "mpnet": _of("MPNet", TEXT, tokens),
    "modernbert": _of(
        "ModernBert",
        {**TEXT, **ENDS, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8},
        tokens,
    ),
    "eurobert": _of("EuroBert", {**TEXT, "num_key_value_heads": 4}, tokens),
    "squeezebert": _of("SqueezeBert", {**TEXT, "embedding_size": 64}, tokens),
    "convbert": _of("ConvBert", {**TEXT, "embedding_size": 64}, tokens),
    "mobilebert": _of(
        "MobileBert", {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}, tokens
    ),
    "roformer": _of("RoFormer", {**TEXT, "embedding_size": 64}, tokens),
    "fnet": _of("FNet", TEXT, tokens_alone),
    "nystromformer": _of("Nystromformer", {**TEXT, "segment_means_seq_len": 16, "num_landmarks": 4}, tokens_alone),
    "xlnet": _of("XLNet", {"vocab_size": 100, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}, tokens),
    "canine": _of("Canine", {**BODY, "num_hash_buckets": 64, "local_transformer_stride": 16}, lambda: tokens(32)),
    "t5_encoder": Architecture("T5EncoderModel", "T5Config", T5, tokens),
    "bart_encoder": Architecture(
        "bart.modeling_bart.BartEncoder",
        "BartConfig",
        {**SMALL, **ENDS, "vocab_size": 100, "d_model": 64, "pad_token_id": 0},
        tokens,
    ),
    "clip_text": Architecture("CLIPTextModel", "CLIPTextConfig", {**TEXT, **ENDS}, tokens),
    "siglip_text": Architecture(
        "SiglipTextModel", "SiglipTextConfig", {**TEXT, **ENDS, "max_position_embeddings": 16}, tokens
    ),
}
IMAGES = {
    "vit": _of("ViT", VISION, image),
    "vit_msn": _of("ViTMSN", VISION, image),
    "ijepa": _of("IJepa", VISION, image),
    "deit": _of("DeiT", VISION, image),
    "beit": _of("Beit", {**VISION, "use_relative_position_bias": True}, image),
    "data2vec_vision": _of("Data2VecVision", {**VISION, "use_relative_position_bias": True}, image),
    "dinov2": _of("Dinov2", VISION, lambda: image(96)),
    "dinov2_with_registers": _of("Dinov2WithRegisters", VISION, image),
    "dinov3_vit": _of("DINOv3ViT", VISION, image),
    "dinov3_convnext": _of("DINOv3ConvNext", SIZES, image),
    "clip_vision": _of("CLIPVision", VISION, image),
    "blip_vision": _of("BlipVision", VISION, image),
    "siglip_vision": _of("SiglipVision", VISION, image),
    "siglip2_vision": _of(
        "Siglip2Vision",
        {**BODY, "patch_size": 16, "num_patches": 16},
        lambda: {
            "pixel_values": torch.rand(1, 16, 768),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]]),
        },
        constants=("pixel_attention_mask",),
    ),
    "convnext": _of("ConvNext", SIZES, image),
    "convnextv2": _of("ConvNextV2", SIZES, image),
    "swin": _of(
        "Swin", {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, image
    ),
    "swinv2": _of(
        "Swinv2", {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, image
    ),
    "focalnet": _of(
        "FocalNet",
        {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]},
        image,
    ),
    "resnet": _of("ResNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}, image),
    "regnet": _of(
        "RegNet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8}, image
    ),
    "bit": _of("Bit", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4}, image),
    "cvt": _of("Cvt", {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 1, 1]}, image),
    "mobilevit": _of(
        "MobileViT",
        {
            "image_size": 64,
            "hidden_sizes": [32, 32, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 32, 32, 64],
            "num_attention_heads": 4,
        },
        image,
    ),
    "mobilevitv2": _of("MobileViTV2", {"image_size": 64, "width_multiplier": 0.25}, image),
    "mobilenet_v1": _of("MobileNetV1", {"image_size": 64, "depth_multiplier": 0.25}, image),
    "mobilenet_v2": _of("MobileNetV2", {"image_size": 64, "depth_multiplier": 0.25}, image),
    "efficientnet": _of(
        "EfficientNet",
        {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
        image,
    ),
    "swiftformer": _of("SwiftFormer", {"depths": [1, 1, 1, 1], "embed_dims": [16, 32, 48, 64]}, image),
    "segformer": _of(
        "Segformer",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64], "decoder_hidden_size": 32},
        image,
        "ForSemanticSegmentation",
    ),
    "poolformer": _of("PoolFormer", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64]}, image),
    "pvt": _of(
        "Pvt",
        {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 32, 64, 64],
            "num_attention_heads": [1, 2, 4, 4],
        },
        image,
    ),
    "pvt_v2": _of(
        "PvtV2",
        {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 32, 64, 64],
            "num_attention_heads": [1, 2, 4, 4],
        },
        image,
    ),
    "levit": _of(
        "Levit",
        {
            "image_size": 64,
            "hidden_sizes": [32, 48, 64],
            "num_attention_heads": [2, 3, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        image,
    ),
    "hiera": _of(
        "Hiera",
        {
            "image_size": [64, 64],
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "patch_stride": [4, 4],
            "masked_unit_size": [4, 4],
            "num_query_pool": 1,
            "query_stride": [2, 2],
        },
        image,
    ),
    "dpt": _of(
        "DPT",
        {
            **VISION,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
            "backbone_config": None,
        },
        image,
        "ForDepthEstimation",
    ),
    "depth_anything": _of(
        "DepthAnything",
        {
            "backbone_config": backbone(
                "Dinov2Config",
                **{**VISION, "num_hidden_layers": 4},
                out_indices=[1, 2, 3, 4],
                reshape_hidden_states=False,
            ),
            "reassemble_hidden_size": 64,
            "patch_size": 16,
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
            "head_hidden_size": 8,
        },
        image,
        "ForDepthEstimation",
    ),
    "sam_vision": _of(
        "SamVision",
        {**BODY, "image_size": 64, "output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 128},
        image,
    ),
    "pixtral": Architecture(
        "PixtralVisionModel",
        "PixtralVisionConfig",
        {**VISION, "head_dim": 16},
        lambda: {**image(), "image_sizes": torch.tensor([[64, 64]])},
    ),
    "idefics3_vision": Architecture(
        "Idefics3VisionTransformer", "idefics3.configuration_idefics3.Idefics3VisionConfig", VISION, image
    ),
    "qwen3_5_vision": Architecture(
        "qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel",
        "qwen3_5.configuration_qwen3_5.Qwen3_5VisionConfig",
        {**TOWER, "patch_size": 16, "num_position_embeddings": 256},
        patches(64, 1536),
    ),
    "qwen2_5_vl_vision": Architecture(
        "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
        "qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig",
        {**TOWER, "patch_size": 14, "fullatt_block_indexes": [1]},
        patches(64, 1176),
    ),
    "yolos": _of(
        "Yolos",
        {**VISION, "image_size": [64, 64], "num_detection_tokens": 5, "num_labels": 3},
        image,
        "ForObjectDetection",
    ),
    "detr": _of(
        "Detr",
        {
            **BOTH,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 5,
            "num_labels": 3,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": backbone(
                "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
            ),
        },
        lambda: {**image(), "pixel_mask": torch.ones(1, 64, 64, dtype=torch.long)},
        "ForObjectDetection",
        constants=("pixel_mask",),
    ),
    "rt_detr": _of(
        "RTDetr",
        {
            "encoder_in_channels": [16, 32, 32],
            "encoder_hidden_dim": 32,
            "d_model": 32,
            "feat_strides": [8, 16, 32],
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 5,
            "decoder_in_channels": [32, 32, 32],
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_denoising": 0,
            "num_labels": 3,
            "hidden_expansion": 0.5,
            "anchor_image_size": None,
            "backbone_config": backbone(
                "RTDetrResNetConfig",
                embedding_size=16,
                hidden_sizes=[16, 16, 32, 32],
                depths=[1, 1, 1, 1],
                out_features=["stage2", "stage3", "stage4"],
            ),
        },
        image,
        "ForObjectDetection",
    ),
    "maskformer_swin": _of(
        "MaskFormer",
        {
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
            "num_labels": 3,
            "backbone_config": backbone(
                "SwinConfig",
                image_size=64,
                embed_dim=16,
                depths=[1, 1, 1, 1],
                num_heads=[2, 2, 2, 2],
                window_size=2,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            "decoder_config": backbone(
                "DetrConfig",
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                num_queries=5,
            ),
        },
        image,
        "ForInstanceSegmentation",
    ),
}
SOUNDS = {
    "whisper_encoder": Architecture("whisper.modeling_whisper.WhisperEncoder", "WhisperConfig", WHISPER, mel),
    "wav2vec2": _of("Wav2Vec2", SPEECH, sound),
    "hubert": _of("Hubert", SPEECH, sound),
    "wavlm": _of("WavLM", SPEECH, sound),
    "unispeech": _of("UniSpeech", SPEECH, sound),
    "unispeech_sat": _of("UniSpeechSat", SPEECH, sound),
    "sew": _of("SEW", {**SPEECH, "conv_dim": [32] * 13}, sound),
    "data2vec_audio": _of("Data2VecAudio", {**SPEECH, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}, sound),
    "parakeet_encoder": Architecture(
        "ParakeetEncoder",
        "ParakeetEncoderConfig",
        {**BODY, "num_mel_bins": 80, "subsampling_conv_channels": 32, "max_position_embeddings": 200},
        frames_of(160, 80),
    ),
    "voxtral_encoder": Architecture(
        "VoxtralEncoder", "VoxtralEncoderConfig", {**BODY, "num_mel_bins": 80, "max_source_positions": 100}, mel
    ),
    "ast": _of("AST", {**BODY, "max_length": 64, "num_mel_bins": 32}, frames_of(64, 32, "input_values")),
    "moonshine_encoder": Architecture(
        "moonshine.modeling_moonshine.MoonshineEncoder",
        "MoonshineConfig",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
        },
        sound,
    ),
    "wav2vec2_bert": _of("Wav2Vec2Bert", {**BODY, "feature_projection_input_dim": 40}, frames_of(50, 40)),
    "clap_audio": _of(
        "ClapAudio",
        {
            "hidden_size": 32,
            "patch_embeds_hidden_size": 16,
            "depths": [1, 1],
            "num_attention_heads": [2, 2],
            "window_size": 4,
            "spec_size": 64,
            "num_mel_bins": 16,
            "projection_dim": 16,
        },
        lambda: {"input_features": torch.rand(1, 1, 250, 16)},
    ),
    "encodec": _of(
        "Encodec",
        {
            "hidden_size": 32,
            "num_filters": 8,
            "upsampling_ratios": [4, 4],
            "codebook_size": 16,
            "target_bandwidths": [24.0],
            "num_lstm_layers": 1,
        },
        lambda: {"input_values": torch.randn(1, 1, 1600)},
    ),
}
DECODERS = {
    "gpt2": _of("GPT2", {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}, decoded, "LMHeadModel"),
    "gpt_neox": _of("GPTNeoX", TEXT, decoded, "ForCausalLM"),
    "opt": _of("OPT", {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}, decoded, "ForCausalLM"),
    "bloom": _of("Bloom", {"vocab_size": 100, "hidden_size": 64, "n_layer": 2, "n_head": 4}, decoded, "ForCausalLM"),
    "llama": _of("Llama", LLM, decoded, "ForCausalLM"),
    "mistral": _of("Mistral", {**LLM, "sliding_window": 8}, decoded, "ForCausalLM"),
    "qwen2": _of("Qwen2", LLM, decoded, "ForCausalLM"),
    "qwen3": _of("Qwen3", {**LLM, "head_dim": 16}, decoded, "ForCausalLM"),
    "gemma2": _of("Gemma2", {**LLM, "head_dim": 16, "sliding_window": 8}, decoded, "ForCausalLM"),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**LLM, "head_dim": 16, "sliding_window": 8}, decoded
    ),
    "phi3": _of("Phi3", LLM, decoded, "ForCausalLM"),
    "olmo2": _of("Olmo2", LLM, decoded, "ForCausalLM"),
    "smollm3": _of("SmolLM3", LLM, decoded, "ForCausalLM"),
    "falcon": _of(
        "Falcon",
        {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        decoded,
        "ForCausalLM",
    ),
    "lfm2": _of(
        "Lfm2",
        {**LLM, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 128},
        decoded,
        "ForCausalLM",
    ),
    "mamba": _of(
        "Mamba",
        {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        lambda: {**tokens_alone(), "use_cache": False},
        "ForCausalLM",
    ),
    "qwen3_moe": _of("Qwen3Moe", {**MIXED, "num_experts": 4, "moe_intermediate_size": 32}, decoded, "ForCausalLM"),
    "mixtral": _of("Mixtral", {**LLM, "num_local_experts": 4}, decoded, "ForCausalLM"),
    "gpt_oss": _of("GptOss", {**MIXED, "num_local_experts": 4, "sliding_window": 8}, decoded, "ForCausalLM"),
    "t5": _of(
        "T5", {**T5, "decoder_start_token_id": 0, "use_cache": False}, answered(tokens), "ForConditionalGeneration"
    ),
    "marian": Architecture(
        "MarianMTModel",
        "MarianConfig",
        {**BOTH, "vocab_size": 100, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
        answered(tokens),
    ),
    "whisper": _of("Whisper", {**WHISPER, "decoder_start_token_id": 1}, answered(mel), "ForConditionalGeneration"),
}
ALL: dict[str, Architecture] = {**TEXTS, **IMAGES, **SOUNDS, **DECODERS}


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a model's result, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
