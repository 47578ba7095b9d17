"""Image inputs and outputs: PIL images on the outside, [1, channels, height, width] arrays of 0 .. 255 on the inside.

Scale and bias are operations of an ML Program, so nothing is normalised here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from portable_coreml.errors import InputError

# ColorSpace of FeatureTypes.proto -> PIL's mode.
_MODES = {10: "L", 20: "RGB", 30: "RGB", 40: "F"}
BGR = 30
_Bounds = tuple[int, int]  # of an extent, both included; the second is negative where there is no limit


def image_to_array(value: Any, description: Any, name: str) -> np.ndarray:
    """Return a PIL image as the program takes it, [1, 1 or 3, H, W]. Raises InputError for a wrong mode or size."""
    from PIL import Image

    kind = description.type.imageType
    if not isinstance(value, Image.Image):
        raise InputError(f"input '{name}' is an image; give a PIL image, not {type(value).__name__}")
    mode = _MODES.get(int(kind.colorSpace), "RGB")
    if value.mode != mode:
        raise InputError(f"input '{name}' is an image of mode {mode}, not {value.mode}")
    allowed = sizes(kind)
    if not any(_within(value.size[0], width) and _within(value.size[1], height) for width, height in allowed):
        shown = " or ".join(f"{_text(width)} x {_text(height)}" for width, height in allowed)
        raise InputError(f"input '{name}' is an image of {shown}, not {value.size[0]} x {value.size[1]}")
    pixels = np.asarray(value, dtype=np.float32)
    if pixels.ndim == 2:
        return pixels[None, None]
    ordered = pixels[:, :, ::-1] if int(kind.colorSpace) == BGR else pixels
    return np.ascontiguousarray(ordered.transpose(2, 0, 1)[None])


def sizes(kind: Any) -> list[tuple[_Bounds, _Bounds]]:
    """Return the allowed (width, height) of an ImageFeatureType message."""
    flexible = kind.WhichOneof("SizeFlexibility")
    if flexible == "imageSizeRange":
        both = kind.imageSizeRange.widthRange, kind.imageSizeRange.heightRange
        width, height = ((int(r.lowerBound), int(r.upperBound)) for r in both)
        return [(width, height)]
    allowed = kind.enumeratedSizes.sizes if flexible == "enumeratedSizes" else [kind]
    return [((int(s.width), int(s.width)), (int(s.height), int(s.height))) for s in allowed]


def _within(size: int, bounds: _Bounds) -> bool:
    low, high = bounds
    return low <= size and (high < 0 or size <= high)


def _text(bounds: _Bounds) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low}...{'' if high < 0 else high}"


def array_to_image(values: np.ndarray, description: Any) -> Any:
    """Return a PIL image of an output [1, 1 or 3, H, W]; values are clipped to 0 .. 255 and rounded."""
    from PIL import Image

    space = int(description.type.imageType.colorSpace)
    planes = values.reshape(values.shape[-3:]).astype(np.float32)  # [channels, H, W]
    if _MODES.get(space) == "F":
        return Image.fromarray(planes[0])
    pixels = np.clip(np.rint(planes), 0, 255).astype(np.uint8)
    if len(pixels) == 1:
        return Image.fromarray(pixels[0])
    return Image.fromarray((pixels[::-1] if space == BGR else pixels).transpose(1, 2, 0))
