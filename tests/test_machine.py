"""What the machine runs programs with is chosen for a while, not for good."""

from __future__ import annotations

import portable_coreml
import pytest

from shardmill import machine


@pytest.mark.skipif(not machine.is_portable(), reason="Core ML has one precision")
@pytest.mark.parametrize("outer", ["fp16", "fp32"])
def test_the_earlier_precision_comes_back(outer: str) -> None:
    first = portable_coreml.precision()
    with machine.load_programs_as(outer):
        with machine.load_programs_as("fp16"), machine.load_programs_as("fp32"):
            assert portable_coreml.precision() == "fp32"
        assert portable_coreml.precision() == outer
        with pytest.raises(ValueError, match="fails"), machine.load_programs_as("fp16"):
            raise ValueError("fails")
        assert portable_coreml.precision() == outer
    assert portable_coreml.precision() == first
