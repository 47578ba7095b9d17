"""Ministral 3's original length: up to it a query's factor is 1, and no further context is built."""

from __future__ import annotations

import limits
import numpy as np
import pytest

from shardmill.errors import CheckpointError
from shardmill.gates.passes import in_passes
from shardmill.gates.stack import feed
from shardmill.gates.thresholds import THRESHOLDS

from . import tiny_families as tiny
from .tiny_configs import MINISTRAL

ORIGINAL = MINISTRAL["rope_parameters"]["original_max_position_embeddings"]


def test_the_last_context_that_is_built_is_the_last_that_is_exact() -> None:
    model, tokens = tiny.tiny_model("ministral3"), tiny.tiny_text(ORIGINAL + 16)
    described = tiny.described(model, ORIGINAL)
    with pytest.raises(CheckpointError, match=f"context {ORIGINAL + 1} is over the original length {ORIGINAL}"):
        tiny.described(model, ORIGINAL + 1)
    engine = tiny.Blocks(described, tiny.tensors_of(model), slots=len(tokens))
    found = feed(engine, tokens, in_passes(len(tokens), [4]))
    truth = tiny.expected(model, tokens)
    limits.rows_agree("up to the original length", found[:ORIGINAL], truth[:ORIGINAL], tiny.limit_of(model))
    assert limits.error(found[ORIGINAL:], truth[ORIGINAL:]) > THRESHOLDS["program_error"].limit
    assert np.isfinite(found).all()
