"""The rules for a checkpoint's pictures, read from its image processor's settings. For builds: it needs transformers.

transformers' own class reads the settings, so that its defaults and the old names of settings hold here as well. Of a
class that needs torchvision the defaults are written down.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.files import load_json
from shardmill.media.image_rules import (
    Area,
    Budget,
    Colour,
    Filter,
    Fixed,
    ImageRules,
    Placeholder,
    Size,
    Split,
    Tiles,
    Within,
)
from shardmill.media.layout import lay_out

SETTINGS = "preprocessor_config.json"
NESTED = "processor_config.json"  # where newer checkpoints keep them, with those of other parts
FILTERS: dict[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # as Pillow counts
LONGEST = 4096  # sides that Idefics3's processor allows; a constant there, too
_AROUND = "<fake_token_around_image>"
_TILED = Placeholder(
    mark="<image>",
    row="<image>",
    after=_AROUND,
    tile=_AROUND + "<row_{row}_col_{column}>",
    tile_row_end="\n",
    tiles_end="\n",
    whole=_AROUND + "<global-img>",
)


@dataclass(frozen=True)
class Processor:
    """How an image processor of transformers is said in rules.

    Attributes:
        module: its module in transformers.models.
        size: from the processor, the checkpoint's config and the most patches of a view to the rule for the size.
        patch, merge: from the processor and the config.
        text: what takes a picture's place, written in the code of transformers' processors, too.
        defaults: of settings, for a class that needs torchvision.
    """

    module: str
    size: Callable[[Any, Mapping[str, Any], int], Size]
    patch: Callable[[Any, Mapping[str, Any]], int]
    merge: Callable[[Any, Mapping[str, Any]], int]
    text: Placeholder
    defaults: Mapping[str, Any] | None = None


def _tiles(processor: Any, config: Mapping[str, Any], most: int) -> Tiles:
    return Tiles(processor.size["longest_edge"], processor.max_image_size["longest_edge"], LONGEST)


def _area(processor: Any, config: Mapping[str, Any], most: int) -> Area:
    return Area(
        *_between(processor.size["shortest_edge"], processor.size["longest_edge"], most * processor.patch_size**2)
    )


def _between(least: int, longest: int, most: int) -> tuple[int, int]:
    """Return the pixels between which pictures are scaled, if a program takes `most`.

    A small picture is scaled up to whole rows, so to more than the least; a quarter leaves room for them.
    """
    return (least, longest) if longest <= most else (min(least, most // 4), most)


def _split(processor: Any, config: Mapping[str, Any], most: int) -> Size:
    """Return LFM2-VL's rule. If no program takes a tile, pictures stay whole, as by `do_image_splitting: false`.

    Raises:
        CheckpointError: if the settings cut pictures in a way that no rules say.
    """
    block, tile = (processor.encoder_patch_size * processor.downsample_factor) ** 2, processor.tile_size
    limits = processor.min_image_tokens * block, processor.max_image_tokens * block
    smallest, largest = _between(*limits, most * processor.encoder_patch_size**2)
    if not processor.do_image_splitting or (tile // processor.encoder_patch_size) ** 2 > most:
        return Split(smallest, largest, 0.0, 0, 1, 1)
    if not processor.use_thumbnail or processor.min_tiles < 2 or tile**2 % block:
        raise CheckpointError(
            f"{SETTINGS}: tiles without the whole picture, of one only or of broken rows: no rules say"
        )
    large = processor.max_image_tokens * block * processor.max_pixels_tolerance
    return Split(smallest, largest, large, tile, processor.min_tiles, processor.max_tiles)


def _fixed(processor: Any, config: Mapping[str, Any], most: int) -> Fixed:
    return Fixed(processor.size["width"], processor.size["height"])


def _gemma3_merge(processor: Any, config: Mapping[str, Any]) -> int:
    rows = int(config.get("mm_tokens_per_image", 256) ** 0.5)
    return int(processor.size["height"] // config["vision_config"]["patch_size"] // rows)


def _vision_patch(processor: Any, config: Mapping[str, Any]) -> int:
    return int(config["vision_config"]["patch_size"])


_IDEFICS = (_tiles, _vision_patch, lambda processor, config: int(config["scale_factor"]), _TILED)
PROCESSORS = {
    "Qwen2VLImageProcessor": Processor(
        "qwen2_vl",
        _area,
        lambda processor, config: int(processor.patch_size),
        lambda processor, config: int(processor.merge_size),
        Placeholder(mark="<|image_pad|>", row="<|image_pad|>"),
    ),
    "Idefics3ImageProcessor": Processor("idefics3", *_IDEFICS),
    "SmolVLMImageProcessor": Processor("smolvlm", *_IDEFICS),
    "Lfm2VlImageProcessor": Processor(
        "lfm2_vl",
        _split,
        lambda processor, config: int(processor.encoder_patch_size),
        lambda processor, config: int(processor.downsample_factor),
        Placeholder(
            mark="<image>",
            row="<image>",
            before="<|image_start|>",
            after="<|image_end|>",
            tile="<|img_row_{row}_col_{column}|>",
            beside="<|img_thumbnail|>",
        ),
        {
            "downsample_factor": 2,
            "do_image_splitting": True,
            "min_tiles": 2,
            "max_tiles": 10,
            "use_thumbnail": True,
            "min_image_tokens": 64,
            "max_image_tokens": 256,
            "encoder_patch_size": 16,
            "tile_size": 512,
            "max_pixels_tolerance": 2.0,
            "do_resize": True,
            "resample": 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    ),
    "Gemma3ImageProcessor": Processor(
        "gemma3",
        _fixed,
        _vision_patch,
        _gemma3_merge,
        Placeholder(
            mark="<start_of_image>",
            row="<image_soft_token>",
            before="\n\n<start_of_image>",
            after="<end_of_image>\n\n",
        ),
    ),
    "Gemma4ImageProcessor": Processor(
        "gemma4",
        lambda processor, config, most: Budget(min(most, processor.max_soft_tokens * processor.pooling_kernel_size**2)),
        lambda processor, config: int(processor.patch_size),
        lambda processor, config: int(processor.pooling_kernel_size),
        Placeholder(mark="<|image|>", row="<|image|>", before="<|image>", after="<image|>"),
    ),
    "PixtralImageProcessor": Processor(
        "pixtral",
        lambda processor, config, most: Within(min(processor.size["longest_edge"], _square(config, most))),
        _vision_patch,
        lambda processor, config: int(config.get("spatial_merge_size", 1)),
        Placeholder(mark="[IMG]", row="[IMG]", line_break="[IMG_BREAK]", after="[IMG_END]"),
    ),
}


def _square(config: Mapping[str, Any], most: int) -> int:
    """Return the side of the largest square of whole rows that `most` patches hold."""
    side = config["vision_config"]["patch_size"] * config.get("spatial_merge_size", 1)
    return int((most * config["vision_config"]["patch_size"] ** 2) ** 0.5 // side * side)


def checkpoint_image_rules(source: Path, most: int) -> ImageRules:
    """Return the rules for a checkpoint's pictures.

    Args:
        source: the folder with the checkpoint's settings.
        most: the most patches of a view that a program takes. A picture that the processor would show larger is made
            smaller, as far as the rules leave that open.

    Raises:
        CheckpointError: if the settings are missing, or of an image processor that has no rules here, or if no program
            takes a picture.
    """
    config = load_json(source / "config.json")
    settings = processor_settings(source, "image_processor", "a picture")
    name = str(settings.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    if name not in PROCESSORS:
        known = ", ".join(sorted(PROCESSORS))
        raise CheckpointError(f"{source / SETTINGS}: no rules for the image processor {name!r}; known are {known}")
    kind = PROCESSORS[name]
    rest = {key: value for key, value in settings.items() if key not in ("image_processor_type", "processor_class")}
    if kind.defaults is None:
        module = importlib.import_module(f"transformers.models.{kind.module}.image_processing_pil_{kind.module}")
        processor = getattr(module, name + "Pil")(**rest)
    else:
        stated = {key: value for key, value in rest.items() if value is not None}
        processor = SimpleNamespace(**{**kind.defaults, **stated})
    for key in ("do_resize", "do_rescale", "do_convert_rgb"):
        if getattr(processor, key, None) is False:
            raise CheckpointError(f"{source / SETTINGS}: {key} is false, which no rules say")
    if getattr(processor, "do_pan_and_scan", None):
        raise CheckpointError(f"{source / SETTINGS}: do_pan_and_scan is true, which no rules say")
    mean, std = _colours(processor, name)
    rules = ImageRules(
        patch=kind.patch(processor, config),
        merge=kind.merge(processor, config),
        filter=FILTERS[int(processor.resample)],
        scale=float(processor.rescale_factor),
        mean=mean,
        std=std,
        size=kind.size(processor, config, most),
        text=kind.text,
    )
    needed = max(height * width for height, width in lay_out(rules, 1, 1).grids)
    if needed > most:
        raise CheckpointError(f"{source}: each picture takes {needed} patches, and the largest program {most}")
    return rules


def processor_settings(source: Path, part: str, thing: str) -> Mapping[str, Any]:
    """Return the settings of an image processor or a feature extractor.

    Args:
        source: the folder with the checkpoint's settings.
        part: the key under which the file of a whole processor has them.
        thing: what the part processes, for an error.

    Raises:
        CheckpointError: if the checkpoint has none.
    """
    if (source / SETTINGS).is_file():
        content: Mapping[str, Any] = load_json(source / SETTINGS)
        return content
    nested = load_json(source / NESTED) if (source / NESTED).is_file() else {}
    if part not in nested:
        raise CheckpointError(f"{source}: has neither {SETTINGS} nor {NESTED}, so nothing says what {thing} becomes")
    settings: Mapping[str, Any] = nested[part]
    return settings


def _colours(processor: Any, name: str) -> tuple[Colour, Colour]:
    """Return mean and std. What Gemma 4's model does to pixels first, 2 (x - 0.5), belongs to the host as well."""
    if name == "Gemma4ImageProcessor":
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    if not processor.do_normalize:
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean, std = ((*map(float, colour),) for colour in (processor.image_mean, processor.image_std))
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
