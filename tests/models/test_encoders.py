"""Every encoder that has a file computes what transformers computes, in any bucket, whatever fills the bucket up."""

from __future__ import annotations

import numpy as np
import pytest

from shardmill.gates.parity import relative_error
from shardmill.models import ENCODER, supported

from . import tiny_encoders as tiny

LIMIT = 2e-5


def test_every_encoder_has_a_tiny_config() -> None:
    """One without would not be tested at all."""
    assert set(tiny.TINY) == set(supported(ENCODER))


@pytest.mark.parametrize(("model_type", "task"), tiny.TASKS)
def test_blocks_compute_what_transformers_computes(model_type: str, task: str) -> None:
    """At every length, with a bucket that the text fills and with one that noise fills up."""
    model = tiny.tiny_model(model_type, task)
    blocks = tiny.Blocks(tiny.described(model), model.state_dict())
    for length in (1, 2, 5, tiny.TEXT):
        tokens = tiny.tiny_text(length)
        truth = tiny.expected(model, tokens)
        exact, padded = blocks.run(tokens, length), blocks.run(tokens, 64, noise=True)
        if task == "text-classification":
            exact, padded = exact[0], padded[0]
        assert relative_error(exact, truth) <= LIMIT, length
        assert relative_error(padded, exact) <= 1e-5, length
        assert np.array_equal(exact.argmax(-1), truth.argmax(-1)), length
