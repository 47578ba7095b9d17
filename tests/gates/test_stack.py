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

from shardmill.gates import stack
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.stack import POSITIONS, compare_distributions
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.machine import is_portable

VOCAB = 16


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log_softmax(-1)


def top1(original: torch.Tensor, shipped: torch.Tensor) -> Measurement:
    """Of logits alone: what follows them does not count."""
    found = stack.top1(compare_distributions(original, shipped, torch.zeros(len(original), dtype=torch.int64)))
    assert isinstance(found, Measurement)
    return found


def test_distributions_are_compared_row_by_row_however_many_there_are() -> None:
    """Blocks of positions save memory and change nothing but the last digits."""
    random = torch.Generator().manual_seed(0)
    original, shipped = torch.randn(2, 2 * POSITIONS + 5, VOCAB, generator=random)
    following = torch.randint(VOCAB, (len(original),), generator=random)
    found, p, q = compare_distributions(original, shipped, following), original.log_softmax(-1), shipped.log_softmax(-1)
    torch.testing.assert_close(found.divergence, (p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(original, following, reduction="none"))
    torch.testing.assert_close(
        found.shipped_loss, torch.nn.functional.cross_entropy(shipped, following, reduction="none")
    )
    assert torch.equal(found.agree, original.argmax(-1) == shipped.argmax(-1))


def test_top1_counts_close_calls_apart() -> None:
    original = logits([5, 0, 0], [0, 5, 0], [1.05, 1, 0], [0, 0, 5])
    shipped = logits([5, 0, 0], [5, 0, 0], [1, 1.05, 0], [0, 0, 5])
    found = top1(original, shipped)
    assert found.value == torch.tensor(2 / 3)
    assert found.detail == "3 clear positions; 0 of 1 others agree"


def test_a_margin_counts_from_a_tenth_of_a_nat() -> None:
    assert top1(logits([0.11, 0, -9]), logits([0, 0.11, -9])).value == 0
    close = logits([0.11, 0, -9], [0.09, 0, -9]), logits([0.11, 0, -9], [0, 0.09, -9])
    assert top1(*close).detail == "1 clear positions; 0 of 1 others agree"


def test_an_original_that_is_decided_nowhere_is_not_asked_for_top1() -> None:
    """It would be the share of nothing, by which a sound program failed."""
    found = stack.top1(compare_distributions(logits([0.09, 0, -9]), logits([0, 0.09, -9]), torch.tensor([0])))
    assert isinstance(found, NotRun) and "decided at no position" in found.reason


def test_a_program_that_is_utterly_wrong_is_told_so() -> None:
    """A loss of over 709 nats has no perplexity in float64; the gate then fails by its name."""
    rows = 4 * torch.eye(VOCAB).roll(1, 1)
    answer = costs(rows, -2000 * torch.eye(VOCAB).roll(1, 1), list(range(VOCAB)))["perplexity_ratio"]
    assert isinstance(answer, Measurement) and answer.value == torch.inf
    assert not THRESHOLDS["perplexity_ratio"].holds(answer.value)


class Known:
    """An engine whose logits depend on the token alone."""

    widths, verify, tokens_max, vocab, slots, lengths = (1, 2), 2, 2, VOCAB, 64, (64,)

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
