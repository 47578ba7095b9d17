"""What the lab's page of norms says: fp16 can't add up such squares, and a norm that divides first does not have to."""

from __future__ import annotations

import limits
import norms
import pytest

from shardmill.models.primitives import RMSNorm

# Numbers that are each off by a share e, in any direction, turn a row by about e: its cosine falls by e^2 / 2.
LEAST = 1 - limits.roundings("fp16", 3).value ** 2 / 2


@pytest.mark.parametrize(("square", "adds_up"), [(80, True), (90, False), (710, False), (2000, False)])
def test_only_a_norm_that_divides_first_survives_large_squares(square: int, adds_up: bool) -> None:
    assert (norms.cosine(norms.plain, square) > LEAST) == adds_up
    assert norms.cosine(RMSNorm(None, norms.EPS).half(), square) > LEAST
