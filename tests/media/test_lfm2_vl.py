"""LFM2-VL's pictures: transformers has one class for them, which needs torchvision, and resizes with its kernels.

The class runs here without torchvision. Its one function that resizes is torch's own, as in torchvision. So layout
and text are equal, and pixels are within three levels, since Pillow rounds otherwise.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import limits
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import image_processing_backends as backends

from shardmill.errors import CheckpointError
from shardmill.media.image_rules import ImageRules, Split, read_image_rules
from shardmill.media.layout import lay_out, most_views, placeholder_text
from shardmill.media.pictures import Picture
from shardmill.media.pixels import View, columns, views
from shardmill.media.processors import PROCESSORS, checkpoint_image_rules

NAME = "Lfm2VlImageProcessor"
LEVELS = 3
SETTINGS = {  # as published, with fields that decide nothing
    "image_processor_type": f"{NAME}Fast",
    "crop_size": None,
    "do_center_crop": None,
    "do_convert_rgb": True,
    "do_pad": True,
    "max_num_patches": 1024,
    "size": {"height": 512, "width": 512},
}
SIZES = [
    (1000, 700),
    (700, 1000),
    (97, 97),
    (640, 96),
    (230, 900),
    (1300, 1250),
]  # three are cut, two of them portraits


class Modes(Enum):
    """torchvision's names of filters."""

    BILINEAR = "bilinear"
    LANCZOS = "lanczos"


def resize(image: torch.Tensor, size: tuple[int, int], interpolation: Modes, antialias: bool) -> torch.Tensor:
    """What torchvision's function does with 8-bit images."""
    return torch.nn.functional.interpolate(image, size, mode=interpolation.value, antialias=antialias)


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """transformers' module of the class."""
    stand_in = SimpleNamespace(InterpolationMode=Modes, resize=resize)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setattr(sys.modules["torchvision.transforms.v2"], "functional", stand_in, raising=False)
        patch.setattr(backends, "tvF", stand_in, raising=False)
        of = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
        patch.delitem(sys.modules, of, raising=False)
        yield importlib.import_module(of)
        del sys.modules[of]


def processor(module: Any) -> Any:
    """An object of transformers' class, which the class itself refuses to make without torchvision."""
    return object.__new__(getattr(module, NAME))


def rules(folder: Path, most: int = 1024, **more: Any) -> ImageRules:
    (folder / "config.json").write_text("{}")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | more))
    return checkpoint_image_rules(folder, most)


def photo(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * height)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    smooth = np.stack([np.sin(9 * x + 3 * y), np.cos(7 * y - x), np.sin(20 * x * y)], -1) * 90 + 128
    return Image.fromarray(np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8))


def split(module: Any, image: Image.Image, **more: Any) -> tuple[list[torch.Tensor], int, int, list[int]]:
    """The pictures that transformers makes, [3, H, W] each, the rows and columns of tiles, and the whole one's size."""
    sizes = ("downsample_factor", "encoder_patch_size", "tile_size", "min_tiles", "max_tiles", "use_thumbnail")
    names = (*sizes, "min_image_tokens", "max_image_tokens", "max_pixels_tolerance")
    kind = processor(module)
    settings = {name: getattr(kind, name) for name in names} | more
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    shown, rows, across, whole = kind.resize_and_split(pixels, **settings, resample=Modes.BILINEAR)
    return list(shown[0]), rows[0], across[0], whole[0]


def test_defaults_are_those_of_the_class(module: Any) -> None:
    defaults = PROCESSORS[NAME].defaults
    assert defaults is not None
    assert {name: getattr(getattr(module, NAME), name) for name in defaults} == defaults


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_within_three_levels_and_columns_in_transformers_order(
    size: tuple[int, int], tmp_path: Path, module: Any
) -> None:
    of, image = rules(tmp_path), photo(*size)
    expected, rows, across, _ = split(module, image)
    layout, seen = views(of, Picture(image))
    assert layout.tiles == ((rows, across) if rows * across > 1 else (0, 0))
    assert [view.grid for view in seen] == [(each.shape[1] // 16, each.shape[2] // 16) for each in expected]
    for view, each in zip(seen, expected, strict=True):
        wanted = View(view.grid, columns(of, each.permute(1, 2, 0).numpy()), of).columns
        ours, of_torch = (np.rint((each + 1) * 127.5) for each in (view.columns, wanted))  # levels are whole numbers
        assert np.abs(ours - of_torch).max() <= LEVELS
        flat = module.convert_image_to_patches((each.float() / 255 - 0.5)[None] / 0.5, 16)[0].numpy()
        blocks = [
            (r + i, c + j)
            for r in range(0, view.grid[0], 2)
            for c in range(0, view.grid[1], 2)
            for i in (0, 1)
            for j in (0, 1)
        ]
        at = [row * view.grid[1] + column for row, column in blocks]
        theirs = flat[at].reshape(len(at), 256, 3).transpose(2, 1, 0).reshape(768, -1)
        limits.numbers_agree("columns", wanted, theirs, limits.roundings("fp32", 3), size=1)


@pytest.mark.parametrize("limits", [{}, {"max_image_tokens": 64, "tile_size": 256}, {"min_tiles": 3, "max_tiles": 7}])
def test_every_size_is_laid_out_as_by_transformers(limits: dict[str, Any], tmp_path: Path, module: Any) -> None:
    of, kind, cut = rules(tmp_path, **limits), processor(module), 0
    settings = dict(PROCESSORS[NAME].defaults or {}) | limits
    factor = {"downsample_factor": 2, "encoder_patch_size": 16}
    largest = {"max_image_tokens": settings["max_image_tokens"], **factor}
    rng = np.random.default_rng(0)
    sizes = [*(rng.integers(8, 2200, (1500, 2)).tolist()), *((side, side) for side in range(1, 1400, 7))]
    for width, height in [*sizes, (1440, 720), (720, 1440), (5, 90)]:
        whole = kind.smart_resize(height, width, min_image_tokens=settings["min_image_tokens"], **largest)
        if whole[0] * whole[1] > settings["max_image_tokens"] * 32**2:
            continue  # transformers has no place for it either
        layout = lay_out(of, width, height)
        if kind._is_image_too_large(height, width, max_pixels_tolerance=2.0, **largest):
            cut += 1
            tiles = (settings["min_tiles"], settings["max_tiles"], settings["tile_size"])
            across, rows, *target, _ = kind._get_grid_layout(height, width, *tiles)
            assert (layout.tiles, layout.resized, layout.whole) == ((rows, across), (tuple(target),), whole)
        else:
            assert (layout.tiles, layout.resized) == ((0, 0), (whole,))
        assert len(layout.grids) <= most_views(of)
    assert cut > 500 and most_views(of) == settings["max_tiles"] + 1


@pytest.mark.parametrize("size", SIZES)
def test_the_text_of_a_picture_is_that_of_transformers(size: tuple[int, int], tmp_path: Path, module: Any) -> None:
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    of = rules(tmp_path)
    _, rows, across, whole = split(module, photo(*size))
    writer = object.__new__(Lfm2VlProcessor)
    vars(writer).update(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
        image_processor=processor(module),
    )
    told = {"image_rows": [rows], "image_cols": [across], "image_sizes": [whole]}
    layout = lay_out(of, *size)
    wanted = writer.replace_image_token(told, 0, use_image_special_tokens=True)
    assert placeholder_text(of, layout) == wanted
    assert wanted.count("<image>") == layout.rows(2)


def test_a_program_that_takes_no_tile_gets_whole_pictures(tmp_path: Path, module: Any) -> None:
    of = rules(tmp_path, 256)
    for size in SIZES:
        (shown,), *_, whole = split(
            module, photo(*size), min_tiles=1, max_tiles=1, min_image_tokens=16, max_image_tokens=64
        )
        ((height, width),) = lay_out(of, *size).grids
        assert [height * 16, width * 16] == whole == [*shown.shape[1:]] and height * width <= 256
    assert read_image_rules(json.loads(json.dumps(of.written()))) == of
    assert rules(tmp_path, do_image_splitting=False).size == Split(1 << 16, 1 << 18, 0.0, 0, 1, 1)


@pytest.mark.parametrize("more", [{"use_thumbnail": False}, {"min_tiles": 1}, {"tile_size": 500}])
def test_tiles_that_no_rules_say_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tiles without the whole picture, of one only or of broken rows"):
        rules(tmp_path, **more)
