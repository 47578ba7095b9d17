"""A gate passes what meets its threshold, names what does not, and lets no NaN through."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest

from shardmill.errors import GateError
from shardmill.gates import adapters, drafts, encoder, parity, residency, rounding, stack, tower
from shardmill.gates.measurement import Measurement
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.witness import part as witness

from .judged import judge


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [
        ("program_error", 1e-4, True),
        ("program_error", 1.0001e-4, False),
        ("psnr", 30.0, True),
        ("psnr", 29.999, False),
        ("argmax_mismatches", 0, True),
        ("argmax_mismatches", 1, False),
    ],
)
def test_the_limit_itself_passes(name: str, value: float, holds: bool) -> None:
    assert THRESHOLDS[name].holds(value) is holds


def test_nan_never_passes() -> None:
    assert [name for name, row in THRESHOLDS.items() if row.holds(float("nan"))] == []
    with pytest.raises(GateError) as missed:
        judge("gate", [Measurement(name, float("nan")) for name in THRESHOLDS])
    assert [name for name in THRESHOLDS if f"{name} is nan" not in str(missed.value)] == []


def test_the_numbers_that_the_design_fixes() -> None:
    """Widths have limits of the model's own, which are no looser than the program's."""
    assert THRESHOLDS["program_error"].limit == 1e-4
    widths = [name for name, row in THRESHOLDS.items() if row.question == "2 widths" and "error" in name]
    limits = {name: THRESHOLDS[name].limit for name in widths if name != "padding_error"}
    assert limits == {name: 0.1 if name.endswith("fp16") else 1e-4 for name in limits}
    assert {row.question for row in THRESHOLDS.values()} == {"1 program", "2 widths", "3 cost", "residency", "witness"}


def test_every_number_of_the_table_is_measured_and_explained() -> None:
    """The table is the one list of what gates measure; a row that no gate names would promise what nobody checks."""
    modules = (adapters, drafts, encoder, parity, rounding, stack, residency, rounding, tower, witness)
    trees = [ast.parse(inspect.getsource(module)) for module in modules]
    strings = {n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert set(THRESHOLDS) <= strings
    assert not [name for name, row in THRESHOLDS.items() if row.meaning.startswith("the same") or not row.why]


@pytest.mark.parametrize(
    "module", [adapters, parity, rounding, stack, residency, rounding, tower, witness], ids=lambda each: each.__name__
)
def test_whatever_is_measured_has_a_threshold(module: ModuleType) -> None:
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.Call)]
    names = {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "Measurement" and isinstance(call.args[0], ast.Constant)
    }
    assert names
    assert names <= set(THRESHOLDS)


# Limits of question 3 by the bits of the weights: looser with fewer, the same for all else.
