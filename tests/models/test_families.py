"""Every family that has a file computes what transformers computes: through its blocks, and as it is shipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardmill.errors import CheckpointError
from shardmill.gates.parity import relative_error
from shardmill.gates.passes import schedules
from shardmill.gates.stack import feed
from shardmill.models import supported
from shardmill.models.architecture import with_tanh

from . import tiny_families as tiny
from .tiny_configs import TINY

LIMIT = 1e-5


def test_every_family_has_a_tiny_config() -> None:
    """A family without one would not be tested at all."""
    assert set(TINY) == set(supported())


WITHOUT_SILU = {"apertus", "nemotron", "nemotron_h", *(name for name in supported() if name.startswith("gemma"))}


@pytest.mark.parametrize("model_type", supported())
def test_silu_from_tanh_is_refused_where_there_is_no_silu(model_type: str) -> None:
    """The key would do nothing there."""
    architecture = tiny.described(tiny.tiny_model(model_type)).architecture
    if model_type not in WITHOUT_SILU:
        assert with_tanh(architecture).graph.activation == "silu_tanh"
        return
    with pytest.raises(CheckpointError, match="has no SiLU; leave `silu` out of the config"):
        with_tanh(architecture)


@pytest.mark.parametrize("silu", ["native", "tanh"])
@pytest.mark.parametrize("model_type", supported())
def test_blocks_compute_what_transformers_computes(model_type: str, silu: str) -> None:
    """In passes of every width, and with drafts that are rejected; in both spellings of SiLU."""
    if silu == "tanh" and model_type in WITHOUT_SILU:
        pytest.skip("no SiLU")
    model, tokens = tiny.tiny_model(model_type), tiny.tiny_text()
    truth, described = tiny.expected(model, tokens), tiny.described(model)
    if silu == "tanh":
        described = replace(described, architecture=with_tanh(described.architecture))
    engine: Any = tiny.Blocks(described, tiny.tensors_of(model))
    passes = schedules(len(tokens), engine.verify, engine.tokens_max) | {"random": tiny.random_passes(len(tokens), 0)}
    for name, schedule in passes.items():
        logits = feed(engine, tokens, schedule)
        assert relative_error(logits, truth) <= LIMIT, name
        assert np.array_equal(logits.argmax(-1), truth.argmax(-1)), name
