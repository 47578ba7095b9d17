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


@pytest.mark.parametrize(
    ("said", "line"), [("one\ntwo", "one"), ("\none", "one"), ("\n", "ValueError"), ("", "ValueError")]
)
def test_an_operation_that_fails_says_why(said: str, line: str) -> None:
    """Some libraries begin what they say with an empty line."""
    assert first_line(ValueError(said)) == line
