"""The measures of the whole stack."""

from __future__ import annotations

import torch

from shardmill.gates.stack import top1


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log_softmax(-1)


def test_top1_counts_close_calls_apart() -> None:
    original = logits([5, 0, 0], [0, 5, 0], [1.05, 1, 0], [0, 0, 5])
    shipped = logits([5, 0, 0], [5, 0, 0], [1, 1.05, 0], [0, 0, 5])
    found = top1(original, shipped)
    assert found.value == torch.tensor(2 / 3)
    assert found.detail == "3 clear positions; 0 of 1 others agree"


def test_a_margin_counts_from_a_tenth_of_a_nat() -> None:
    assert top1(logits([0.11, 0, -9]), logits([0, 0.11, -9])).value == 0
    assert "0 clear positions" in top1(logits([0.09, 0, -9]), logits([0, 0.09, -9])).detail
