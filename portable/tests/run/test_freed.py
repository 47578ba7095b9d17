"""A program that ran is freed with its last reference: nothing of it waits for the garbage collector.

What a program holds may be gigabytes in a handful of objects, and the collector goes by the number of objects.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import portable_coreml
import pytest
import torch
from portable_coreml import FirstNonFinite, trace
from portable_coreml.proxy import MLModelProxy
from portable_coreml.run import stored
from portable_coreml.run.execute import Executable

from tests.conftest import step_inputs
from tests.run.test_ownership import CHOICE, program


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Without the collector, whatever a circle of references holds stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held(executable: Executable) -> dict[str, weakref.ref[Any]]:
    """What a program that ran consists of: itself, its steps, its plans and the constants of these."""
    plans = list(executable._plans.values())
    assert plans
    found: dict[str, Any] = {"program": executable, "steps": executable.lowered}
    for i, plan in enumerate(plans):
        found[f"plan {i}"] = plan
        found |= {f"{name} of plan {i}": v for name, v in plan.__globals__.items() if isinstance(v, torch.Tensor)}
    return {name: weakref.ref(item) for name, item in found.items()}


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("large", [stored.LARGE, 1])
def test_a_model_that_ran_is_freed(
    precision: str, large: int, attention_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At several widths, observed once, and wherever its matrices lie."""
    monkeypatch.setattr(stored, "LARGE", large)
    portable_coreml.install(precision)
    model = MLModelProxy(str(attention_package))
    state = model.newState()
    for tokens in (1, 3, 1):
        model.predict(step_inputs(32, 8, 0, tokens, 0), state)
    with trace(FirstNonFinite()):
        model.predict(step_inputs(32, 8, 0, 1, 0), state)
    references = held(state.owner)
    assert len(references) > 4 and alive(references) == list(references)
    del model
    assert alive(references) == list(references)  # its state speaks for it
    del state
    assert alive(references) == []


def test_a_program_with_branches_is_freed() -> None:
    made = program("bool p, tensor<fp32, [2]> x", CHOICE)
    for first in (True, False):
        made.run({"x": torch.ones(2), "p": torch.tensor(first)}, {})
    references = held(made)
    del made
    assert alive(references) == []
