"""Every family that has a file computes what transformers computes: through its blocks, and as it is shipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardmill.gates.parity import relative_error
from shardmill.gates.passes import schedules
from shardmill.gates.stack import feed
from shardmill.models import supported

from . import tiny_families as tiny

LIMIT = 1e-5


def test_every_family_has_a_tiny_config() -> None:
    """A family without one would not be tested at all."""
    assert set(tiny.TINY) == set(supported())


@pytest.mark.parametrize("model_type", supported())
def test_blocks_compute_what_transformers_computes(model_type: str) -> None:
    """In passes of every width, and with drafts that are rejected."""
    model, tokens = tiny.tiny_model(model_type), tiny.tiny_text()
    truth = tiny.expected(model, tokens)
    engine: Any = tiny.Blocks(tiny.described(model), tiny.tensors_of(model))
    passes = schedules(len(tokens), engine.verify, engine.tokens_max) | {"random": tiny.random_passes(len(tokens), 0)}
    for name, schedule in passes.items():
        logits = feed(engine, tokens, schedule)
        assert relative_error(logits, truth) <= LIMIT, name
        assert np.array_equal(logits.argmax(-1), truth.argmax(-1)), name
