"""Prompts of a model with recurrences in passes of several blocks: what transformers computes, in every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted_decoding import PrefixCache, Session, run
from drafted_decoding.policies import AlwaysDraft
from kit_runner.figures import relative_error
from safetensors.torch import load_file

from shardmill.gates import measurement, residency, stack
from shardmill.gates.nonfinite import audit_values
from shardmill.gates.passes import in_passes, part_schedules
from shardmill.gates.runner import PartRunner
from shardmill.gates.stack import TurningDrafter, decode_one_by_one
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.machine import is_portable, load_programs_as
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place

from . import tiny_families
from .test_shipped_families import CONTEXT, Shipped, ship

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have"),
    pytest.mark.slow,
]
LIMIT, NEW, SHORT, PLENTY = THRESHOLDS["program_error"].limit, 12, 56, 10**9
FAMILIES = ("qwen3_5_text", "granitemoehybrid", "nemotron_h")  # gated DeltaNet, and Mamba-2 of one group and of four
FORMS: dict[str, dict[str, Any]] = {
    "graph": {"shapes": "fixed", "contexts": [SHORT]},
    "host": {"shapes": "fixed", "state": "host", "contexts": [SHORT]},
}
WIDTHS = {"max": 32, "verify": 4}


@dataclass(frozen=True)
class Blocks:
    """A build with passes of four blocks, its engine in fp32, a text, and what transformers finds for any text."""

    shipped: Shipped
    engine: Engine
    text: list[int]
    theirs: Callable[[list[int]], np.ndarray]  # logits [n, vocab] of n tokens


@pytest.fixture(scope="module", params=product(FAMILIES, FORMS), ids="-".join)
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blocks]:
    folder, (family, form) = tmp_path_factory.mktemp("blocks"), request.param
    checkpoint = tiny_families.write_tiny(family, folder / "checkpoint")
    shipped = ship(checkpoint, folder, WIDTHS, **FORMS[form])
    with load_programs_as("fp32"):
        engine = Engine(in_place(shipped.plan, shipped.packages, shipped.table), Path("/"))
    text = tiny_families.tiny_text(CONTEXT - NEW)
    stored, table = shipped.stored(), load_file(shipped.table)["embedding"].numpy()
    yield Blocks(shipped, engine, text, lambda tokens: stored.logits(tokens, table).numpy())


def test_the_gates_of_the_stack_pass_with_several_blocks(blocks: Blocks) -> None:
    """Program error, every width, mixtures, rejected drafts and filled passes, and moves between contexts."""
    found = list(stack.program_and_widths(lambda: blocks.engine, blocks.shipped.stored(), blocks.text[:80]))
    rows = measurement.compare(one for one in found if isinstance(one, measurement.Measurement))
    measurement.demand("stack", rows)
    assert {row["detail"] for row in rows} >= {"T=32", "mixed", "padded", "rejected drafts", "moving between contexts"}


def test_a_part_leaves_the_same_rings_and_caches(blocks: Blocks) -> None:
    """However its tokens are cut, by the schedules of its gate."""
    part, plan = next(p for p in blocks.shipped.parts.values() if p.kind == "layers"), blocks.shipped.plan
    runner = PartRunner(blocks.shipped.packages[part.name], part, plan)
    rows = {"x": np.random.default_rng(0).normal(size=(80, part.spec.graph.hidden)).astype(np.float32)}
    with load_programs_as("fp32"):
        plain, states = runner.run(rows, in_passes(80, [1]))
        for name, passes in part_schedules(part, 80, plan["verify"]).items():
            found, left = runner.run(rows, passes)
            assert relative_error(found, plain) <= LIMIT, name
            assert {*left} == {*states} and "c_0" in left
            assert all(relative_error(left[key].ravel(), states[key].ravel()) <= LIMIT for key in states), name


@pytest.mark.parametrize("length", [5, 12, 31, 32, 33, 40, 63, 64, 65, 97])
def test_a_prompt_of_any_length_ends_in_transformers_logits(blocks: Blocks, length: int) -> None:
    """And of the text that drafts carry on from there, each token is the one that transformers finds most likely."""
    engine, prompt = blocks.engine, blocks.text[:length]
    engine.reset()
    found = Session(engine).prefill(prompt)
    assert relative_error(found.row[None], blocks.theirs(prompt)[-1:]) <= LIMIT
    assert found.passes <= length // WIDTHS["max"] + 4
    truth = decode_one_by_one(engine, prompt, NEW)
    engine.reset()
    drafter = TurningDrafter(length, truth, engine.vocab)
    said = run(Session(engine), prompt, max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft())
    assert [*said.tokens] == truth and 0 < sum(said.accepted) < sum(said.drafted)
    assert truth == blocks.theirs([*prompt, *truth])[length - 1 : -1].argmax(-1).tolist()


def test_a_prompt_is_fed_again_only_as_far_as_it_differs(blocks: Blocks) -> None:
    """From the beginning of the last block, or from a copy of the end of another text."""
    engine, first = blocks.engine, blocks.text[:64]
    engine.reset()
    session = Session(engine, prefixes=PrefixCache(engine, PLENTY))
    session.prefill(first)
    within = [*first[:58], 3, 4, 5]
    found = session.prefill(within)
    assert (found.reused, found.passes) == (58, 1)
    session.prefill(blocks.text[40:80])
    for prompt, reused in (([*first, *blocks.text[:20]], 64), (first, 63)):
        fresh = Session(engine).prefill(prompt).row
        session = Session(engine, prefixes=PrefixCache(engine, PLENTY))
        session.prefill(first)
        session.prefill(blocks.text[40:80])
        found = session.prefill(prompt)
        assert found.reused == reused
        assert relative_error(found.row[None], fresh[None]) <= LIMIT


def test_every_operation_of_several_blocks_is_known_to_run_on_the_neural_engine(blocks: Blocks) -> None:
    """By the placement rules, in each function."""
    for name, package in blocks.shipped.packages.items():
        rows, findings = residency.predict(package, WIDTHS["max"], fixed=True)
        measurement.demand(name, measurement.compare(residency.placement_measurements(rows, findings)))
        assert {row.function for row in rows} >= {"t1", "t4", "t32"}


def test_an_audit_of_values_sees_the_state(blocks: Blocks) -> None:
    """It runs the same passes as a prompt, so the state of the last of them is not zero."""
    audit_values(blocks.engine, blocks.text[:96])
    state = next(name for name in blocks.engine.layers[0].program.caches if name.startswith("s_"))
    audited = blocks.engine.layers[0].program.kept(state)
    blocks.engine.reset()
    stack.feed(blocks.engine, blocks.text[:96], in_passes(96, [WIDTHS["max"]]))
    assert np.array_equal(audited, blocks.engine.layers[0].program.kept(state)) and audited.any()
