"""What the machine runs programs with is chosen for a while, not for good."""

from __future__ import annotations

import pytest

import shardmill.portable
from shardmill import host


@pytest.mark.skipif(not host.is_portable(), reason="Core ML has one precision")
@pytest.mark.parametrize("outer", ["fp16", "fp32"])
def test_the_earlier_precision_comes_back(outer: str) -> None:
    first = shardmill.portable.precision()
    with host.load_programs_as(outer):
        with host.load_programs_as("fp16"), host.load_programs_as("fp32"):
            assert shardmill.portable.precision() == "fp32"
        assert shardmill.portable.precision() == outer
        with pytest.raises(ValueError, match="fails"), host.load_programs_as("fp16"):
            raise ValueError("fails")
        assert shardmill.portable.precision() == outer
    assert shardmill.portable.precision() == first
