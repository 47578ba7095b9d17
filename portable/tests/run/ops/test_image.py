"""Operations on images compute what their arguments say, or refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from portable_coreml.errors import ExecutionError
from portable_coreml.run.ops.image import affine

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
    assert torch.allclose(affine(X, SAME, **COMPUTED), X, atol=1e-5)
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
