"""Predicted costs: fp16 first, then each emulation, as plain numbers that no gate reads."""

from __future__ import annotations

import torch

from shardmill.gates.predicted import predicted_costs
from shardmill.machine import precision

from .test_stack import VOCAB, Known

ROWS = 4 * torch.eye(VOCAB).roll(1, 1)
TOKENS = list(range(VOCAB))


def test_each_precision_has_a_row_and_programs_are_loaded_in_it() -> None:
    loaded = []

    def load() -> Known:
        loaded.append(precision())
        return Known(ROWS if loaded[-1] == "fp16" else 0.5 * ROWS.roll(1, 0))

    fp16, tables = predicted_costs(load, TOKENS, ROWS, ["ane:tables"])  # type: ignore[arg-type]
    assert loaded == [fp16["precision"], tables["precision"]] == ["fp16", "ane:tables"]
    assert fp16 == {"precision": "fp16", "deviations": [], "top1": 1.0, "kl": 0.0}
    assert tables["top1"] == 0 and tables["kl"] > 1
    assert tables["deviations"] == ["sigmoid, silu and tanh are read from tables of 33 numbers"]


def test_logits_that_are_not_finite_have_no_cost() -> None:
    """A sum that leaves the fixed point's range; the page says so instead of a number."""
    broken = ROWS.clone()
    broken[3, 3] = torch.inf
    (row,) = predicted_costs(lambda: Known(broken), TOKENS, ROWS, [])  # type: ignore[arg-type, return-value]
    assert (row["top1"], row["kl"]) == (None, None)
