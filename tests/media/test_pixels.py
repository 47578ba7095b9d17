"""A picture's columns, layout and text are those of transformers' processors, bit by bit, given the same resizing.

The processors resize with Pillow's own order, which hangs on Pillow's version and on the shape. Here they resize in two
calls: first the width, then the height.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardmill.errors import CheckpointError, MediaError
from shardmill.media.image_rules import ImageRules, Within, read_image_rules
from shardmill.media.layout import lay_out, most_views, placeholder_text
from shardmill.media.pictures import open_picture
from shardmill.media.pixels import views
from shardmill.media.processors import PROCESSORS, checkpoint_image_rules

MANY = 1 << 20
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# By name: settings of the image processor, and what of the checkpoint's config counts.
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen": (
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 16,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            **HALF,
        },
        {},
    ),
    "qwen-old": ({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 200704}, {}),
    "smolvlm": (
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 512},
            "max_image_size": {"longest_edge": 128},
        },
        {"scale_factor": 4, "vision_config": {"patch_size": 16}},
    ),
    "smolvlm-2.2b": (  # a tile is no whole number of patches
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 240},
            "max_image_size": {"longest_edge": 60},
        },
        {"scale_factor": 2, "vision_config": {"patch_size": 14}},
    ),
    "smolvlm-whole": (  # no tiles
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 128},
            "max_image_size": {"longest_edge": 128},
        },
        {"scale_factor": 4, "vision_config": {"patch_size": 16}},
    ),
    "idefics3": (
        {"image_processor_type": "Idefics3ImageProcessor"},
        {"scale_factor": 2, "vision_config": {"patch_size": 14}},
    ),
    "gemma3": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 224, "width": 224}},
        {"mm_tokens_per_image": 16, "vision_config": {"patch_size": 14}},
    ),
    "gemma4": ({"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70}, {}),
    "mistral": (
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 560}, "patch_size": 28},
        {"spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
    ),
}
SIZES = [(300, 210), (210, 301), (97, 97), (640, 96), (130, 700)]  # two are portraits


def photo(width: int, height: int) -> Image.Image:
    """Smooth shapes, an edge and noise."""
    rng = np.random.default_rng(width * height)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    smooth = np.stack([np.sin(9 * x + 3 * y), np.cos(7 * y - x), np.sin(20 * x * y)], -1) * 90 + 128
    smooth[height // 4 : height // 2, width // 3 : width // 2] = (250, 10, 30)
    return Image.fromarray(np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def rules(tmp_path: Path) -> Callable[..., ImageRules]:
    def read(name: str, most: int = MANY, nested: bool = False, **more: Any) -> ImageRules:
        settings, config = CHECKPOINTS[name]
        (tmp_path / "config.json").write_text(json.dumps(config))
        content = {**settings, **more}
        file = "processor_config.json" if nested else "preprocessor_config.json"
        (tmp_path / file).write_text(json.dumps({"image_processor": content} if nested else content))
        return checkpoint_image_rules(tmp_path, most)

    return read


def reference(name: str) -> Any:
    """transformers' image processor of a checkpoint."""
    settings = dict(CHECKPOINTS[name][0])
    kind = settings.pop("image_processor_type").removesuffix("Fast")
    of = PROCESSORS[kind].module
    return getattr(importlib.import_module(f"transformers.models.{of}.image_processing_pil_{of}"), kind + "Pil")(
        **settings
    )


@pytest.fixture
def in_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Image.Image.resize

    def resize(self: Image.Image, size: tuple[int, int], resample: int, **more: Any) -> Image.Image:
        return once(once(self, (size[0], self.height), resample), size, resample)

    monkeypatch.setattr("PIL.Image.Image.resize", resize)


def as_columns(image: np.ndarray, rules: ImageRules) -> np.ndarray:
    """[3, H, W] as columns, in loops: each block of the model's rows, in it each patch."""
    patch, side = rules.patch, rules.side
    image = image[:, : image.shape[1] // patch * patch, : image.shape[2] // patch * patch]
    return np.stack(
        [
            image[:, y : y + patch, x : x + patch].ravel()
            for top in range(0, image.shape[1], side)
            for left in range(0, image.shape[2], side)
            for y in range(top, top + side, patch)
            for x in range(left, left + side, patch)
        ],
        axis=1,
    )


def expected(name: str, rules: ImageRules, image: Image.Image) -> list[np.ndarray]:
    """The columns of each view by transformers."""
    told = reference(name)([image], return_tensors="np")
    pixels = told["pixel_values"]
    if name.startswith("qwen"):  # columns already, of two equal frames
        frames = pixels.reshape(len(pixels), 3, 2, -1)
        assert (frames[:, :, 0] == frames[:, :, 1]).all()
        return [frames[:, :, 0].reshape(len(pixels), -1).T]
    if name == "gemma4":  # patches in reading order with the colour last; the model itself does 2 (x - 0.5)
        count, patch = 9 * told["num_soft_tokens_per_image"][0], rules.patch
        width, height = told["image_position_ids"][0, :count].max(0) + 1
        whole = pixels[0, :count].reshape(height, width, patch, patch, 3).transpose(4, 0, 2, 1, 3)
        return [as_columns(2 * (whole.reshape(3, height * patch, width * patch) - np.float32(0.5)), rules)]
    return [as_columns(view, rules) for view in (pixels[0] if pixels.ndim == 5 else pixels)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.usefixtures("in_two_calls")
def test_columns_equal_those_of_transformers(
    name: str, size: tuple[int, int], rules: Callable[..., ImageRules]
) -> None:
    image, of = photo(*size), rules(name)
    layout, seen = views(of, open_picture(png(image)))
    wanted = expected(name, of, image)
    assert [view.columns.shape for view in seen] == [columns.shape for columns in wanted]
    for view, columns in zip(seen, wanted, strict=True):
        assert view.columns.dtype == np.float32 and view.levels.dtype == np.uint8
        np.testing.assert_array_equal(view.columns, columns)
        assert view.grid[0] * view.grid[1] == columns.shape[1]
    assert layout.rows(of.merge) == sum(columns.shape[1] for columns in wanted) // of.merge**2


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_no_picture_has_more_views_than_are_planned(name: str, rules: Callable[..., ImageRules]) -> None:
    of = rules(name)
    counts = {len(lay_out(of, width, height).grids) for width in range(40, 1300, 60) for height in range(40, 1300, 60)}
    assert max(counts) == most_views(of)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rules_are_the_same_after_they_were_written(name: str, rules: Callable[..., ImageRules]) -> None:
    of = rules(name)
    assert read_image_rules(json.loads(json.dumps(of.written()))) == of


def test_settings_may_stand_in_the_newer_file(rules: Callable[..., ImageRules]) -> None:
    assert rules("gemma4", nested=True).merge == 3


@pytest.mark.parametrize(
    ("name", "patches"), [("qwen", 1024), ("qwen", 64), ("mistral", 256), ("gemma4", 630), ("gemma4", 2520)]
)
def test_a_picture_fits_the_program_that_takes_it(name: str, patches: int, rules: Callable[..., ImageRules]) -> None:
    """The processor's own limit holds where it is lower; a photo of 12 megapixels shrinks to what there is."""
    of = rules(name, patches)
    for size in [(4032, 3024), (3024, 4032), (40, 500), (7, 7), (1000, 700)]:
        ((height, width),) = lay_out(of, *size).grids
        assert 0 < height * width <= patches
    assert lay_out(of, 4032, 3024).rows(of.merge) > 0.6 * min(patches, 630 if name == "gemma4" else MANY) / of.merge**2


def test_the_processors_limit_stands_if_it_is_lower(rules: Callable[..., ImageRules]) -> None:
    assert rules("mistral").size == Within(560)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"image_processor_type": "VideoMAEImageProcessor"},
            "no rules for the image processor 'VideoMAEImageProcessor'",
        ),
        ({"do_rescale": False}, "do_rescale is false"),
        ({"do_pan_and_scan": True, "image_processor_type": "Gemma3ImageProcessor"}, "do_pan_and_scan is true"),
    ],
)
def test_settings_that_no_rules_say_are_refused(
    more: dict[str, Any], said: str, rules: Callable[..., ImageRules]
) -> None:
    with pytest.raises(CheckpointError, match=said):
        rules("gemma3", **more)


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has neither preprocessor_config.json nor processor_config.json"):
        checkpoint_image_rules(tmp_path, MANY)


@pytest.mark.parametrize("size", [(1, 201), (2010, 10), (16000, 16)])
def test_a_picture_that_is_too_narrow_is_refused(size: tuple[int, int], rules: Callable[..., ImageRules]) -> None:
    with pytest.raises(MediaError, match="too narrow"):
        lay_out(rules("idefics3"), *size)


def test_a_picture_that_is_too_narrow_for_the_program_is_refused(rules: Callable[..., ImageRules]) -> None:
    """Qwen's rule never makes a side shorter than a row, so the pixels can exceed what the program takes."""
    with pytest.raises(MediaError, match="too narrow for 16384 pixels"):
        lay_out(rules("qwen", 64), 40, 4000)


def test_no_rules_show_a_view_that_no_program_takes(rules: Callable[..., ImageRules]) -> None:
    with pytest.raises(CheckpointError, match="each picture takes 256 patches, and the largest program 128"):
        rules("gemma3", 128)


def test_a_picture_that_no_patches_hold_is_refused(rules: Callable[..., ImageRules]) -> None:
    with pytest.raises(MediaError, match="does not fit 8 patches"):
        lay_out(rules("gemma4", 8), 300, 300)


TEXTS: dict[str, tuple[str, dict[str, Any]]] = {  # the processor that writes a text, and what its method reads
    "smolvlm": (
        "SmolVLMProcessor",
        {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
    ),
    "smolvlm-whole": (
        "SmolVLMProcessor",
        {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
    ),
    "idefics3": (
        "Idefics3Processor",
        {"fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>"},
    ),
    "gemma4": ("Gemma4Processor", {"boi_token": "<|image>", "eoi_token": "<image|>"}),
    "qwen": ("Qwen3VLProcessor", {}),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_picture_is_that_of_transformers(
    name: str, size: tuple[int, int], rules: Callable[..., ImageRules]
) -> None:
    """Only the method of the processor runs that writes it: the whole needs torchvision."""
    of = rules(name)
    kind, more = TEXTS[name]
    family = {"Qwen3VLProcessor": "qwen3_vl", "SmolVLMProcessor": "smolvlm"}.get(kind, name)
    processor = object.__new__(
        getattr(importlib.import_module(f"transformers.models.{family}.processing_{family}"), kind)
    )
    layout = lay_out(of, *size)
    length = layout.rows(of.merge) // len(layout.grids)
    vars(processor).update(more, image_token=of.text.row, image_processor=reference(name), image_seq_len=length)
    tiles = {"return_row_col_info": True} if "row" in of.text.tile else {}
    told = processor.image_processor([photo(*size)], return_tensors=None if tiles else "np", **tiles)
    wanted = processor.replace_image_token(dict(told), 0)
    assert placeholder_text(of, layout) == wanted
    assert wanted.count(of.text.row) == layout.rows(of.merge)


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("mistral", (84, 56), "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"),
        ("gemma3", (50, 50), "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"),
    ],
)
def test_the_text_of_a_picture_is_written_out(
    name: str, size: tuple[int, int], text: str, rules: Callable[..., ImageRules]
) -> None:
    """Of these, transformers' processors can't be read here, or write the text when they are made."""
    of = rules(name)
    assert placeholder_text(of, lay_out(of, *size)) == text
