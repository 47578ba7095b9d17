"""What passes of models with experts are said to read: by the plan's numbers, and as drawn choices come out."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from models.tiny_configs import tiny_config

from shardmill import config, models
from shardmill.errors import CheckpointError
from shardmill.models.architecture import SLIDING_MASK, Architecture, Experts, with_experts
from shardmill.pipeline import traffic
from shardmill.plan import empty_parts
from shardmill.weight_files import file_bytes


def architecture(model_type: str, **changes: Any) -> Architecture:
    """That of a tiny model."""
    found = tiny_config(model_type, **changes)
    described: Architecture = models.family(model_type).describe(found, 64).architecture
    return described


def settings(**changes: Any) -> config.Config:
    return config.config_of({"model": "m", "source": {"path": "."}, "context": 64, **changes})


@pytest.mark.parametrize(("count", "chosen", "size", "skips"), [(16, 1, 2, True), (32, 4, 4, False), (12, 3, 6, False)])
def test_a_group_is_missed_as_often_as_drawn_choices_miss_it(count: int, chosen: int, size: int, skips: bool) -> None:
    experts = Experts(count, chosen, 8, skips=skips)
    rng = np.random.default_rng(0)
    drawn = rng.random((40_000, experts.classes)).argsort(axis=1)[:, :chosen]
    assert traffic.missed(experts, size) == pytest.approx(float((drawn >= size).all(axis=1).mean()), abs=0.01)


def test_both_forms_are_told_whichever_is_built() -> None:
    """A pass of one token calls every layer's part, as many groups as it takes at most, and the head."""
    a = architecture("granitemoe")
    dense = traffic.pass_traffic(settings(), a)
    routed = traffic.pass_traffic(settings(experts=4), with_experts(a, routed=True))
    assert [(p.experts, p.tokens) for p in routed] == [(e, t) for e in ("dense", "routed") for t in (1, 4)]
    assert [(p.experts, p.groups) for p in dense] == [("dense", 0)] * 2 + [("routed", 1)] * 2  # too small to divide
    assert dense[0] == routed[0]
    one, four = routed[2:]
    assert dense[0].dispatches == dense[1].dispatches == 2
    assert 2 + 1 + 2 < one.dispatches < 2 + 1 + 2 * 3 < four.dispatches < 2 + 1 + 2 * 4
    assert one.bytes < four.bytes < dense[0].bytes * 1.1


def test_a_model_without_experts_has_no_choice() -> None:
    assert traffic.pass_traffic(settings(), architecture("llama")) == ()
    with pytest.raises(CheckpointError, match="experts: llama has none; leave `experts` out of the config"):
        with_experts(architecture("llama"), routed=True)


def test_weights_are_told_by_the_form_that_they_have() -> None:
    """What is no matrix is in fp16, and every number is counted once, with its scales."""
    a, chosen = architecture("llama"), settings(topology=[[0, 2]], head={"slices": 1}, convert={"precision": "int4"})
    parts = [part for part in empty_parts(chosen, a) if part.kind != "embedding"]
    found = traffic.stored_weights(parts, chosen.convert.recipe)
    shapes = [(part.kind, shape) for part in parts for shape in part.shapes.values()]
    layers, head = ([shape for kind, shape in shapes if len(shape) == 2 and kind == k] for k in ("layers", "head"))
    rest = [shape for _, shape in shapes if len(shape) != 2]
    assert found.bytes_by_form == {
        "fp16": sum(2 * prod(shape) for shape in rest),
        "int4": sum(rows * columns // 2 + 2 * rows for rows, columns in layers),
        "int8": sum(rows * columns + 2 * rows for rows, columns in head),
    }
    files = sum(file_bytes(part.named_shapes, chosen.convert.recipe) for part in parts)
    assert found.bits_per_weight == round(8 * files / sum(prod(shape) for _, shape in shapes), 3)


def test_a_shorter_context_saves_the_slots_of_the_layers_that_keep_them() -> None:
    """And the products of attention with them; rings and weights are read in every context."""
    a = architecture("gemma3_text")
    full = [kind for kind in a.kinds if kind.mask != SLIDING_MASK]
    assert 0 < len(full) < a.layers
    short, whole = traffic.traffic_lengths(settings(program={"shapes": "fixed", "contexts": [40]}), a)
    assert (short.slots, whole.slots) == (40, 64)
    row = 2 * a.graph.kv_heads * a.graph.head_dim  # numbers of a key and a value
    assert whole.kept - short.kept == whole.bytes - short.bytes == len(full) * 24 * row * 2
    assert whole.operations - short.operations == len(full) * 24 * 2 * 2 * a.graph.heads * a.graph.head_dim
    assert traffic.traffic_lengths(settings(), a) == ()


def test_operations_are_those_of_every_matrix_once() -> None:
    """An embedding is looked up, and norms are no matrices."""
    a = architecture("llama")
    (short, _) = traffic.traffic_lengths(settings(program={"shapes": "fixed", "contexts": [8]}), a)
    g = a.graph
    matrices = g.hidden * g.head_dim * (2 * g.heads + 2 * g.kv_heads) + 3 * g.hidden * g.ffn
    attention = 2 * 8 * g.heads * g.head_dim
    assert short.operations == 2 * (a.layers * (matrices + attention) + a.vocab * g.hidden)
