"""What the lab's page of norms says: fp16 can't add up such squares, and a norm that divides first does not have to."""

from __future__ import annotations

import norms
import pytest

from shardmill.models.primitives import RMSNorm


@pytest.mark.parametrize(("square", "adds_up"), [(80, True), (90, False), (710, False), (2000, False)])
def test_only_a_norm_that_divides_first_survives_large_squares(square: int, adds_up: bool) -> None:
    assert (norms.cosine(norms.plain, square) > 1 - 1e-5) == adds_up
    assert norms.cosine(RMSNorm(None, norms.EPS).half(), square) > 1 - 1e-5
