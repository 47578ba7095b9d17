"""What a part's parity is measured on: its own weights, programs and edges of the reference, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny

from shardmill.pipeline.steps import parity, parity_stack
from shardmill.plan import Part


def key(plan: Any, part: Part, package: str = "p", bundle: str = "b", reference: str = "r") -> str:
    return parity.part_action(plan, part, package, bundle, reference).key


@pytest.mark.parametrize("change", [{"package": "q"}, {"bundle": "q"}, {"reference": "q"}])
def test_other_programs_and_another_reference_are_measured_anew(built: tiny.Build, change: dict[str, str]) -> None:
    part = built.parts["head_0"]
    assert key(built.plan, part, **change) != key(built.plan, part)


def test_other_weights_are_measured_anew_even_if_they_gave_the_same_package(built: tiny.Build) -> None:
    """The package's weights are compared with the checkpoint's."""
    part = built.parts["layers_02_03"]
    tensors = (replace(part.tensors[0], sha256="0" * 64), *part.tensors[1:])
    assert key(built.plan, replace(part, tensors=tensors)) != key(built.plan, part)


def test_where_the_weights_lie_does_not_count(built: tiny.Build) -> None:
    part = built.parts["layers_02_03"]
    moved = replace(part, tensors=tuple(replace(tensor, file="other", start=0) for tensor in part.tensors))
    assert key(built.plan, moved) == key(built.plan, part)


def test_another_embedding_in_the_checkpoint_is_measured_anew_even_if_it_gave_the_same_table(built: tiny.Build) -> None:
    """The stack's gate compares the table with the checkpoint's rows, most of which no other input depends on."""
    part = built.parts["embedding"]
    other = replace(part, tensors=(replace(part.tensors[0], sha256="0" * 64),))
    keys = {parity_stack.action(built.plan, ["p"], ["b"], "r", "t", piece).key for piece in (part, other)}
    assert len(keys) == 2
