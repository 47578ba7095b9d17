"""Operations on images compute what their arguments say, or refuse."""

from __future__ import annotations

from typing import Any

import limits
import pytest
import torch
from portable_coreml.errors import ExecutionError
from portable_coreml.run.lowered import call_kernel
from portable_coreml.run.ops import Kernel, find_kernel
from portable_coreml_extra.image import affine

X = torch.arange(16.0).reshape(1, 1, 4, 4)
SAME = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
COMPUTED: dict[str, Any] = {
    "output_height": 4,
    "output_width": 4,
    "sampling_mode": "bilinear",
    "padding_mode": "constant",
    "padding_value": 0.0,
    "coordinates_mode": "normalized_minus_one_to_one",
    "align_corners": True,
}


def test_a_transform_that_changes_nothing_gives_the_image() -> None:
    limits.numbers_agree(
        "the image", affine(X, SAME, **COMPUTED), X, limits.roundings("fp32", 8)
    )  # places, four shares
    assert torch.equal(affine(X, SAME, **COMPUTED | {"padding_mode": "Constant"}), affine(X, SAME, **COMPUTED))


@pytest.mark.parametrize(
    "other",
    [
        {"sampling_mode": "nearest"},
        {"padding_mode": "border"},
        {"padding_value": 1.0},
        {"coordinates_mode": "unnormalized"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_transform_of_another_kind_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ExecutionError, match="affine with .*only .* is computed"):
        affine(X, SAME, **COMPUTED | other)


def called(kind: str, **given: object) -> tuple[Kernel, list[object]]:
    """An operation's kernel, and all its arguments in order."""
    kernel = find_kernel(kind)
    assert kernel is not None
    return kernel, [given.get(param.name, param.default) for param in kernel.params]


def test_where_the_size_can_not_be_told_without_data_the_kernel_runs() -> None:
    """The boxes of crop_resize are data."""
    x, roi = torch.arange(16.0).view(1, 1, 4, 4), torch.tensor([0.0, 1, 1, 2, 2]).view(1, 1, 5, 1, 1)
    kernel, given = called("crop_resize", x=x, roi=roi, target_height=2, target_width=2, sampling_mode="ALIGN_CORNERS")
    assert call_kernel(kernel, given).flatten().tolist() == [5, 6, 9, 10]


@pytest.mark.parametrize(("count", "expected"), [(3, [0, 1, 1]), (4, [0, 0, 1, 1]), (2, [0, 1])])
def test_resize_takes_the_nearest_element(count: int, expected: list[int]) -> None:
    """The first is coremltools' own example (iOS17, test_resize_nearest_neighbor)."""
    x = torch.tensor([0.0, 1.0])
    kernel, given = called("resize", x=x, shape=[count], resized_dims=1, interpolation_mode="NEAREST_NEIGHBOR")
    assert call_kernel(kernel, given).tolist() == expected
