"""Running one kernel: its size is found out first where arguments decide it."""

from __future__ import annotations

import pytest
import torch
from portable_coreml.errors import ExecutionError, first_line
from portable_coreml.run.lowered import call_kernel
from portable_coreml.run.ops import KERNELS


def arguments(kind: str, **given: object) -> list[object]:
    return [given.get(param.name, param.default) for param in KERNELS[kind].params]


def test_a_result_that_no_memory_holds_is_refused_before_it_is_made() -> None:
    with pytest.raises(ExecutionError, match=r"the result of fill of shape \[16777216, 16777216\] is larger"):
        call_kernel(KERNELS["fill"], arguments("fill", shape=[1 << 24, 1 << 24], value=torch.tensor(1.0)))


def test_where_the_size_can_not_be_told_without_data_the_kernel_runs() -> None:
    """The boxes of crop_resize are data."""
    x, roi = torch.arange(16.0).view(1, 1, 4, 4), torch.tensor([0.0, 1, 1, 2, 2]).view(1, 1, 5, 1, 1)
    given = arguments("crop_resize", x=x, roi=roi, target_height=2, target_width=2, sampling_mode="ALIGN_CORNERS")
    assert call_kernel(KERNELS["crop_resize"], given).flatten().tolist() == [5, 6, 9, 10]


@pytest.mark.parametrize(("count", "expected"), [(3, [0, 1, 1]), (4, [0, 0, 1, 1]), (2, [0, 1])])
def test_resize_takes_the_nearest_element(count: int, expected: list[int]) -> None:
    """The first is coremltools' own example (iOS17, test_resize_nearest_neighbor)."""
    x = torch.tensor([0.0, 1.0])
    given = arguments("resize", x=x, shape=[count], resized_dims=1, interpolation_mode="NEAREST_NEIGHBOR")
    assert call_kernel(KERNELS["resize"], given).tolist() == expected


@pytest.mark.parametrize(
    ("said", "line"), [("one\ntwo", "one"), ("\none", "one"), ("\n", "ValueError"), ("", "ValueError")]
)
def test_an_operation_that_fails_says_why(said: str, line: str) -> None:
    """Some libraries begin what they say with an empty line."""
    assert first_line(ValueError(said)) == line
