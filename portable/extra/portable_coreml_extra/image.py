"""Resizing, cropping and resampling of images [..., H, W].

Every linear resize is two passes of "gather two rows, blend": grid points per axis come from the sampling mode's
formula in coremltools' documentation of `resize_bilinear`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from portable_coreml.errors import ExecutionError
from portable_coreml.run.ops.registry import Ints, Pairs, kernel
from torch import Tensor


@kernel("non_maximum_suppression")
def non_maximum_suppression(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    score_threshold: float | None = None,
    per_class_suppression: bool = False,
) -> tuple[Tensor, ...]:
    """Suppress boxes that overlap a likelier one.

    In iOS15: boxes [n, B, 4], a score threshold and a fourth result, the count. In iOS17: boxes [n, 4, B], neither.
    """
    last = score_threshold is None
    if last:
        boxes, scores = boxes.transpose(1, 2), scores.transpose(1, 2)
    picked = [
        _select(b, s, iou_threshold, score_threshold, max_boxes, per_class_suppression)
        for b, s in zip(boxes, scores, strict=True)
    ]
    count = torch.tensor([len(p) for p in picked], dtype=torch.int32)
    out_boxes = torch.zeros(len(picked), max_boxes, 4)
    out_scores = torch.zeros(len(picked), max_boxes, scores.shape[2])
    indices = torch.full((len(picked), max_boxes), -1, dtype=torch.int32)
    for i, rows in enumerate(picked):
        out_boxes[i, : len(rows)], out_scores[i, : len(rows)] = boxes[i, rows], scores[i, rows]
        indices[i, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
    if last:
        return out_boxes.transpose(1, 2), out_scores.transpose(1, 2), indices
    return out_boxes, out_scores, indices, count


def _select(boxes: Tensor, scores: Tensor, iou: float, floor: float | None, limit: int, per_class: bool) -> list[int]:
    best, owner = scores.max(1)
    order = torch.argsort(best, descending=True, stable=True).tolist()
    chosen: list[int] = []
    for i in order:
        if len(chosen) == limit or (floor is not None and float(best[i]) < floor):
            break
        rivals = [j for j in chosen if not per_class or owner[i] == owner[j]]
        if all(_overlap(boxes[i], boxes[j]) <= iou for j in rivals):
            chosen.append(i)
    return chosen


def _overlap(a: Tensor, b: Tensor) -> float:
    """Return intersection over union of two boxes (x, y, width, height), (x, y) the centre."""
    low = torch.maximum(a[:2] - a[2:] / 2, b[:2] - b[2:] / 2)
    high = torch.minimum(a[:2] + a[2:] / 2, b[:2] + b[2:] / 2)
    shared = float((high - low).clamp(min=0).prod())
    union = float(a[2:].prod() + b[2:].prod()) - shared
    return shared / union if union else 0.0


@kernel("classify")
def classify(probabilities: Tensor, classes: Ints) -> tuple[Any, Any]:
    """Return the likeliest class and {class: probability}: the only results that are not tensors."""
    flat = probabilities.reshape(-1).tolist()
    table = dict(zip(classes, flat, strict=True))
    return classes[int(probabilities.reshape(-1).argmax())], table


@kernel("depth_to_space", exact=True)
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, block_size, block_size, c // block_size**2, h, w)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(n, c // block_size**2, h * block_size, w * block_size)


@kernel("space_to_depth", exact=True)
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // block_size, block_size, w // block_size, block_size)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, c * block_size**2, h // block_size, w // block_size)


@kernel("pixel_shuffle", exact=True)
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    return F.pixel_shuffle(x, upscale_factor)


@kernel("pixel_unshuffle", exact=True)
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    return F.pixel_unshuffle(x, downscale_factor)


@kernel("space_to_batch", exact=True)
def space_to_batch(x: Tensor, block_shape: Ints, paddings: Pairs) -> Tensor:
    (top, bottom), (left, right) = paddings
    x = F.pad(x, [left, right, top, bottom])
    n, c, h, w = x.shape
    b0, b1 = block_shape
    blocks = x.reshape(n, c, h // b0, b0, w // b1, b1)
    return blocks.permute(3, 5, 0, 1, 2, 4).reshape(b0 * b1 * n, c, h // b0, w // b1)


@kernel("batch_to_space", exact=True)
def batch_to_space(x: Tensor, block_shape: Ints, crops: Pairs) -> Tensor:
    (top, bottom), (left, right) = crops
    n, c, h, w = x.shape
    b0, b1 = block_shape
    blocks = x.reshape(b0, b1, n // (b0 * b1), c, h, w)
    full = blocks.permute(2, 3, 4, 0, 5, 1).reshape(n // (b0 * b1), c, h * b0, w * b1)
    return full[:, :, top : h * b0 - bottom, left : w * b1 - right]


_AFFINE = ("bilinear", "constant", 0.0, "normalized_minus_one_to_one")
_PADDING = {"constant": "zeros", "border": "border", "reflection": "reflection", "symmetric": "symmetric"}


def _grid_points(size: int, count: int, mode: str) -> Tensor:
    """Return positions in [0, size - 1] of `count` samples of an axis."""
    steps = torch.arange(count, dtype=torch.float64)
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        if count == 1:
            return torch.tensor([(size - 1) / 2 if mode == "ALIGN_CORNERS" else 0.0], dtype=torch.float64)
        points = steps * ((size - 1) / (count - 1))
    elif mode == "DEFAULT":
        points = steps * (size / count)
    elif mode == "OFFSET_CORNERS":
        delta = max(1, size - 1) / count
        points = 0.5 * delta + steps * delta
    else:  # UNALIGN_CORNERS
        points = (steps + 0.5) * (size / count) - 0.5
    return points.clamp(0, size - 1)


def _linear(x: Tensor, axis: int, points: Tensor) -> Tensor:
    low = points.floor().to(torch.int64)
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    weight = (points - low).to(torch.float32).reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])
    left, right = x.index_select(axis, low), x.index_select(axis, high)
    return left + (right - left) * weight


def _nearest(x: Tensor, axis: int, count: int) -> Tensor:
    index = (torch.arange(count, dtype=torch.float64) * (x.shape[axis] / count)).floor().to(torch.int64)
    return x.index_select(axis, index.clamp(max=x.shape[axis] - 1))


def _resize(x: Tensor, height: int, width: int, mode: str) -> Tensor:
    rows = _linear(x, -2, _grid_points(x.shape[-2], height, mode))
    return _linear(rows, -1, _grid_points(x.shape[-1], width, mode))


@kernel("upsample_nearest_neighbor", exact=True, grows=True)
def upsample_nearest_neighbor(x: Tensor, scale_factor_height: float = 1, scale_factor_width: float = 1) -> Tensor:
    height, width = math.floor(x.shape[-2] * scale_factor_height), math.floor(x.shape[-1] * scale_factor_width)
    return _nearest(_nearest(x, -2, height), -1, width)


@kernel("resize_nearest_neighbor", exact=True, grows=True)
def resize_nearest_neighbor(x: Tensor, target_size_height: int, target_size_width: int) -> Tensor:
    return _nearest(_nearest(x, -2, target_size_height), -1, target_size_width)


@kernel("upsample_bilinear", grows=True)
def upsample_bilinear(
    x: Tensor,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    height, width = math.floor(x.shape[-2] * scale_factor_height), math.floor(x.shape[-1] * scale_factor_width)
    if align_corners:
        return _resize(x, height, width, "STRICT_ALIGN_CORNERS")
    return _resize(x, height, width, "UNALIGN_CORNERS" if half_pixel_centers in (None, True) else "DEFAULT")


@kernel("resize_bilinear", grows=True)
def resize_bilinear(
    x: Tensor, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Tensor:
    return _resize(x, target_size_height, target_size_width, sampling_mode)


@kernel("resize", grows=True)
def resize(
    x: Tensor, shape: Ints, resized_dims: int, interpolation_mode: str = "LINEAR", sampling_mode: str = "DEFAULT"
) -> Tensor:
    for i in range(resized_dims):
        axis = x.dim() - resized_dims + i
        count = int(shape[len(shape) - resized_dims + i]) or x.shape[axis]
        if interpolation_mode == "NEAREST_NEIGHBOR":
            points = _grid_points(x.shape[axis], count, sampling_mode)
            x = x.index_select(axis, (points - 0.5).ceil().to(torch.int64))  # of two as near the first: 2x repeats
        else:
            x = _linear(x, axis, _grid_points(x.shape[axis], count, sampling_mode))
    return x


@kernel("crop", exact=True)
def crop(x: Tensor, crop_height: Ints, crop_width: Ints) -> Tensor:
    (top, bottom), (left, right) = crop_height, crop_width
    return x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]


@kernel("crop_resize", grows=True)
def crop_resize(
    x: Tensor,
    roi: Tensor | None = None,
    boxes: Tensor | None = None,
    box_indices: Tensor | None = None,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Tensor:
    """Crop boxes and resize them.

    iOS15 and 16 give `roi` [N, 1, 4 or 5, 1, 1] and get rank 5; iOS17 gives `boxes` [N, 4] and gets rank 4.
    """
    if roi is not None:
        flat = roi.reshape(roi.shape[0], -1)
        indexed = flat.shape[1] == 5
        coordinates = flat[:, 1:] if indexed else flat
        images = [x[int(i)].unsqueeze(0) for i in flat[:, 0]] if indexed else [x] * len(flat)
    else:
        assert boxes is not None
        coordinates = boxes.to(torch.float32)
        picked = range(len(boxes)) if box_indices is None else box_indices.tolist()
        images = [x[int(i)].unsqueeze(0) for i in picked]
    scale = (x.shape[-2] - 1, x.shape[-1] - 1) if normalized_coordinates else (1, 1)
    crops = []
    for image, row in zip(images, coordinates.tolist(), strict=True):
        top, left, bottom, right = _corners(row, box_coordinate_mode)
        ys = _box_points(
            top * scale[0] * spatial_scale, bottom * scale[0] * spatial_scale, target_height, sampling_mode
        )
        xs = _box_points(left * scale[1] * spatial_scale, right * scale[1] * spatial_scale, target_width, sampling_mode)
        crops.append(_sample_box(image, ys, xs, pad_value))
    out = torch.stack(crops)  # [N, B or 1, C, h, w]
    return out if roi is not None else out.squeeze(1)


def _corners(row: list[float], mode: str) -> tuple[float, float, float, float]:
    a, b, c, d = row
    if mode.endswith("WIDTH_FIRST"):
        a, b, c, d = b, a, d, c
    return (a - c / 2, b - d / 2, a + c / 2, b + d / 2) if mode.startswith("CENTER") else (a, b, c, d)


def _box_points(start: float, end: float, count: int, mode: str) -> Tensor:
    steps = torch.arange(count, dtype=torch.float64)
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        if count == 1:
            return torch.tensor([(start + end) / 2 if mode == "ALIGN_CORNERS" else start], dtype=torch.float64)
        return start + steps * ((end - start) / (count - 1))
    if mode == "OFFSET_CORNERS":
        delta = (end - start) / count
        return start + 0.5 * delta + steps * delta
    if mode == "UNALIGN_CORNERS":
        spacing = (end - start + 1) / count
        return start + steps * spacing + 0.5 * spacing - 0.5
    spacing = (end - start + 1) / count
    return start + steps * spacing


def _sample_box(image: Tensor, ys: Tensor, xs: Tensor, pad_value: float) -> Tensor:
    height, width = image.shape[-2:]
    rows = _linear(image, image.dim() - 2, ys.clamp(0, height - 1))
    out = _linear(rows, image.dim() - 1, xs.clamp(0, width - 1))
    outside = ((ys < 0) | (ys > height - 1)).unsqueeze(1) | ((xs < 0) | (xs > width - 1))
    return torch.where(outside, torch.tensor(pad_value), out) if pad_value or bool(outside.any()) else out


@kernel("affine", grows=True)
def affine(
    x: Tensor,
    transform_matrix: Tensor,
    output_height: int,
    output_width: int,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    options = (sampling_mode.lower(), padding_mode.lower(), float(padding_value), coordinates_mode.lower())
    if options != _AFFINE:  # coremltools makes no others, but a file may have them
        raise ExecutionError(f"affine with {options}: only {_AFFINE} is computed")
    theta = transform_matrix.reshape(-1, 2, 3).expand(x.shape[0], 2, 3)
    grid = F.affine_grid(theta, [x.shape[0], x.shape[1], output_height, output_width], align_corners=align_corners)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=align_corners)


@kernel("resample")
def resample(
    x: Tensor,
    coordinates: Tensor,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    grid = coordinates.to(torch.float32)
    height, width = x.shape[-2:]
    corners = align_corners
    if coordinates_mode == "unnormalized":
        corners = True
        spans = torch.tensor([max(width - 1, 1), max(height - 1, 1)], dtype=torch.float32)
        grid = 2.0 * grid / spans - 1.0
    elif coordinates_mode == "normalized_zero_to_one":
        grid = 2.0 * grid - 1.0
    mode = "nearest" if sampling_mode == "nearest" else "bilinear"
    if padding_mode == "symmetric":  # reflection about the outer edge of the border pixels
        return F.grid_sample(x, _to_edges(grid, height, width, corners), mode, "reflection", align_corners=False)
    if padding_mode == "reflection" and not corners:
        grid, corners = _to_centers(grid, height, width), True
    shifted = x - padding_value if padding_mode == "constant" and padding_value else x
    out = F.grid_sample(shifted, grid, mode, _PADDING[padding_mode], align_corners=corners)
    return out + padding_value if shifted is not x else out


def _to_edges(grid: Tensor, height: int, width: int, corners: bool) -> Tensor:
    """Return coordinates of align_corners=True for use with align_corners=False."""
    sizes = torch.tensor([width, height], dtype=torch.float32)
    return grid * (sizes - 1) / sizes if corners else grid


def _to_centers(grid: Tensor, height: int, width: int) -> Tensor:
    """Return coordinates of align_corners=False for use with align_corners=True."""
    sizes = torch.tensor([width, height], dtype=torch.float32)
    return grid * sizes / (sizes - 1).clamp(min=1)
