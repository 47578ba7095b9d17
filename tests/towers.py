"""Small models with a tower for images, in which everything a tower could get wrong matters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from models.tiny_families import tensors_of, tiny_model
from mtp_layers import halved
from safetensors.torch import save_file

from shardmill.models.contract import DECAY_SCALE
from shardmill.runtime.tower import places

PATCH, SIDE, MERGE = 8, 6, 2
WIDTH = 64
VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "depth": 3,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_heads": 2,
        "num_position_embeddings": SIDE * SIDE,
        "out_hidden_size": 64,
        "patch_size": PATCH,
    },
    "smolvlm": {
        "num_hidden_layers": 3,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "image_size": SIDE * PATCH,
        "patch_size": PATCH,
    },
    "lfm2_vl": {
        "num_hidden_layers": 3,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_patches": SIDE * SIDE,
        "patch_size": PATCH,
        "vision_use_head": False,
    },
}
VISION |= {"idefics3": VISION["smolvlm"]}
BUCKETS = {"qwen3_5": [32, 64], "smolvlm": [SIDE * SIDE], "idefics3": [SIDE * SIDE], "lfm2_vl": [32, 64]}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * (PATCH * MERGE) ** 2, "longest_edge": 64 * (PATCH * MERGE) ** 2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 2 * SIDE * PATCH},
        "max_image_size": {"longest_edge": SIDE * PATCH},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "lfm2_vl": {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "encoder_patch_size": PATCH,
        "downsample_factor": MERGE,
        "tile_size": SIDE * PATCH,
        "min_image_tokens": 1,
        "max_image_tokens": 15,
        "max_tiles": 4,
    },
}
PROCESSORS |= {"idefics3": PROCESSORS["smolvlm"] | {"image_processor_type": "Idefics3ImageProcessor"}}
FREE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def pictured(kind: str = "qwen3_5", **changes: Any) -> Any:
    """transformers' tiny model, whose tower has drawn weights that fp16 holds."""
    model = tiny_model(kind, vision_config=VISION[kind], image_token_id=250, **{**FREE, **changes})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if _of_tower(name):
                weight.copy_(_drawn(name, weight, generator))
            weight.copy_(_rates(weight) if _is_rate(name) else halved(name, weight))
    return model


def _is_rate(name: str) -> bool:
    return name.endswith("A_log")


def _rates(logs: torch.Tensor) -> torch.Tensor:
    """Logarithms of rates that fp16 holds once they are scaled as programs have them."""
    return ((logs.exp() * DECAY_SCALE).half().float() / DECAY_SCALE).log()


def _of_tower(name: str) -> bool:
    return any(part in name for part in ("visual.", "vision_model.", "connector.", "vision_tower.", "projector."))


def _drawn(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Gains around one, and projections with which attention is peaked and every branch counts."""
    noise = torch.rand(weight.shape, generator=generator) * 2 - 1
    if weight.ndim == 1:
        return 0.3 * noise + float("norm" in name and name.endswith("weight"))
    if "pos_embed" in name or "position_embedding" in name:
        return noise
    gain = 2.5 if "qkv" in name or "q_proj" in name or "k_proj" in name else 1.5
    return gain * noise / weight[0].numel() ** 0.5


def write_pictured(folder: Path, kind: str = "qwen3_5", **changes: Any) -> Path:
    """Writes a checkpoint, in fp16 but for rates, with config, tokenizer and the settings of its image processor."""
    model = pictured(kind, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(json.dumps(model.config.to_dict(), default=str))
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    held = {name: each for name, each in tensors_of(model).items() if name not in tied}
    stored = {name: (each if _is_rate(name) else each.half()).contiguous() for name, each in held.items()}
    save_file(stored, folder / "model.safetensors")
    tiny.train_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


KEYS = {
    "qwen3_5": ("image_grid_thw", "mm_token_type_ids"),
    "smolvlm": (),
    "idefics3": (),
    "lfm2_vl": ("spatial_shapes",),
}  # what transformers' model takes beside pixels


def given(model: Any, shown: Sequence[Any], rules: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model for images, given their views in order."""
    columns = [torch.from_numpy(view.columns) for view in shown]
    if "image_grid_thw" in KEYS[model.config.model_type]:
        flat = [
            each.T.reshape(len(each.T), 3, 1, -1).expand(-1, -1, rules["frames"], -1).flatten(1) for each in columns
        ]
        return {"pixel_values": torch.cat(flat), "image_grid_thw": torch.tensor([[1, *view.grid] for view in shown])}
    images = []
    for view, each in zip(shown, columns, strict=True):
        pixels = torch.empty(*view.grid, 3, PATCH, PATCH)
        at = torch.from_numpy(places(view.grid, rules["merge"]))
        pixels[at[:, 0], at[:, 1]] = each.T.reshape(-1, 3, PATCH, PATCH)
        images.append(pixels.permute(2, 0, 3, 1, 4).reshape(3, view.grid[0] * PATCH, view.grid[1] * PATCH))
    if "spatial_shapes" in KEYS[model.config.model_type]:
        return patched(images, [view.grid for view in shown])
    return {"pixel_values": torch.stack(images)[None]}


def patched(images: Sequence[torch.Tensor], grids: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Images [3, H, W] as patches row by row, the colours of a pixel side by side, filled up to the longest."""
    rows = [
        image.reshape(3, h, PATCH, w, PATCH).permute(1, 3, 2, 4, 0).reshape(h * w, -1)
        for image, (h, w) in zip(images, grids, strict=True)
    ]
    whole = [torch.ones(len(each), dtype=torch.int32) for each in rows]
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "pixel_attention_mask": torch.nn.utils.rnn.pad_sequence(whole, batch_first=True),
        "spatial_shapes": torch.tensor(grids),
    }
