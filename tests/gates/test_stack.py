"""The measures of the whole stack, and that a large one fits into memory."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafted_decoding.engine import PlainEngine

from shardmill.gates import stack
from shardmill.gates.measurement import Measurement, NotRun, Stretch
from shardmill.gates.passes import sampled
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.machine import is_portable

VOCAB = 16


def test_a_program_that_is_utterly_wrong_is_told_so() -> None:
    """A loss of over 709 nats has no perplexity in float64; the gate then fails by its name."""
    rows = 4 * torch.eye(VOCAB).roll(1, 1)
    answer = costs(rows, -2000 * torch.eye(VOCAB).roll(1, 1), list(range(VOCAB)))["perplexity_ratio"]
    assert isinstance(answer, Measurement) and answer.value == torch.inf
    assert not THRESHOLDS["perplexity_ratio"].holds(answer.value)


class Known(PlainEngine):
    """An engine whose logits depend on the token alone."""

    widths, verify, tokens_max, pads, vocab, slots, lengths = (1, 2), 2, 2, False, VOCAB, 64, (64,)

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.table = rows.numpy(), np.zeros((VOCAB, 4), np.float16)

    def reset(self) -> None:
        """It holds nothing."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        """Logits [T, vocab]."""
        return self.rows[list(tokens)]


def costs(rows: torch.Tensor, shipped: torch.Tensor, tokens: list[int]) -> dict[str, Measurement | NotRun]:
    """What `cost` says of an engine with logits `shipped` by token, where the original's are `rows`."""
    return {found.name: found for found in stack.cost(lambda: Known(shipped), tokens, rows[tokens])}  # type: ignore[arg-type, return-value]


def test_a_model_that_reads_its_text_is_asked_for_top1_and_perplexity() -> None:
    rows = 4 * torch.eye(VOCAB).roll(1, 1)  # token i is followed by i + 1
    found = costs(rows, 3.9 * torch.eye(VOCAB).roll(1, 1), list(range(VOCAB)))
    assert isinstance(found["top1_agreement"], Measurement) and found["top1_agreement"].value == 1
    assert isinstance(found["perplexity_ratio"], Measurement) and 1 < found["perplexity_ratio"].value < 1.1


def test_a_long_text_is_compared_stretch_by_stretch() -> None:
    """At the sampled positions, whose passes alone run the LM head; other passes are only written."""
    written: list[Sequence[int]] = []

    class Drifting(Known):
        slots = 600

        def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
            return self.rows[list(tokens)] * (1 + 0.1 * (np.asarray(positions)[:, None] >= 256))

        def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
            written.append(positions)

    rows, tokens = 4 * torch.eye(VOCAB), [i % VOCAB for i in range(550)]
    engine: Any = Drifting(rows)
    mean, *along = stack.cost_along(lambda: engine, tokens, rows[[tokens[p] for p in sampled(550)]])
    assert [(one.start, one.stop) for one in along if isinstance(one, Stretch)] == [(224, 256), (480, 512), (518, 550)]
    first, *later = [one.kl for one in along if isinstance(one, Stretch)]
    assert first == 0 and later == [pytest.approx(later[0])] * 2 and later[0] > 0
    assert isinstance(mean, Measurement) and mean.value == pytest.approx(2 / 3 * later[0])
    assert mean.detail == "at 96 positions of 550" and {*sampled(550)}.isdisjoint(p for at in written for p in at)

    engine = Known(rows * torch.nan)
    engine.write, engine.programs = engine.forward, []
    (only,) = stack.cost_along(lambda: engine, tokens, rows[[tokens[p] for p in sampled(550)]])
    assert isinstance(only, Measurement) and math.isnan(only.value)


def test_a_model_that_can_t_read_its_text_is_not() -> None:
    """With random weights both numbers jump by chance; the KL divergence is measured all the same."""
    rows = 4 * torch.eye(VOCAB).roll(1, 1)
    found = costs(rows, 3.9 * torch.eye(VOCAB).roll(1, 1), list(range(VOCAB))[::-1])
    assert isinstance(found["kl"], Measurement) and 0 < found["kl"].value < 0.1
    for name in ("top1_agreement", "perplexity_ratio"):
        answer = found[name]
        assert isinstance(answer, NotRun)
        assert f"over its {VOCAB} tokens" in answer.reason


@pytest.mark.skipif(not is_portable(), reason="Core ML computes in fp16 only, so the stack is loaded once there")
def test_the_first_engine_is_gone_before_the_second_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two full-size engines at a time would not fit; nothing may hold the first, not even until the next collection."""
    rows = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(12)
    monkeypatch.setattr(stack.StoredModel, "logits", lambda *_: rows[tokens[:8]])
    alive: list[weakref.ref[Known]] = []

    def load() -> Known:
        assert all(engine() is None for engine in alive)
        made = Known(rows)
        alive.append(weakref.ref(made))
        return made

    states = {"tokens": tokens, "hidden": torch.zeros(1, 8, 4), "logits": rows[tokens]}
    reference = SimpleNamespace(model=torch.nn.Linear(4, 4))
    gc.disable()
    try:
        found = list(stack.stack_parity(load, stack.StoredModel(reference, None, tuple, lambda rows: rows), states))  # type: ignore[arg-type]
    finally:
        gc.enable()
    assert len(alive) == 2
    assert not any(math.isnan(m.value) for m in found if isinstance(m, Measurement))
