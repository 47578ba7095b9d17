"""Experts that the host routes to: the same tokens as with all of them in the layers' programs, and transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import routed
import tiny
import torch
from drafted_decoding import Session, run
from drafted_decoding.policies import AlwaysDraft

from shardmill.gates.routed import observed
from shardmill.gates.stack import TurningDrafter, decode_one_by_one
from shardmill.machine import is_portable
from shardmill.runtime import engine
from shardmill.runtime.manifest import in_place

PROMPT, NEW, CONTEXT = 8, 100, 128
pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="in fp16, which Core ML computes in, close calls differ"),
    pytest.mark.slow,
]
Pair = tuple[tiny.Build, tiny.Build]


@pytest.fixture(scope="module", params=["granitemoe", "granitemoehybrid", "qwen3_moe", "zaya"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One checkpoint in both forms, with the weights that it has: bf16's digits are fp16's."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    source, groups = routed.checkpoint(request.param, folder), routed.GROUPS[request.param]
    made = [routed.build(source, folder / str(e), e, "fp16", context=CONTEXT) for e in ("dense", groups)]
    return made[0], made[1]


def load(build: tiny.Build) -> engine.Engine:
    manifest = in_place(build.plan, build.packages, build.table)
    return engine.Engine(json.loads(json.dumps(manifest)), Path("/"))


def greedy(build: tiny.Build, prompt: Sequence[int]) -> list[int]:
    """What transformers says."""
    tokens = list(prompt)
    with torch.no_grad():
        model = tiny.transformers_model(build.source)
        for _ in range(NEW):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.usefixtures("fp32")
def test_the_tokens_are_those_of_dense_experts_and_of_transformers(both: Pair) -> None:
    """Also where drafts are rejected, whose tokens take experts too."""
    dense, apart = both
    prompt = apart.text[:PROMPT]
    made = load(apart)
    truth = decode_one_by_one(made, prompt, NEW)
    assert truth == decode_one_by_one(load(dense), prompt, NEW) == greedy(apart, prompt)
    drafter = TurningDrafter(PROMPT, truth, made.vocab)
    made.reset()
    found = run(Session(made), prompt, max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft())
    assert list(found.tokens) == truth
    assert 0 < sum(found.accepted) < sum(found.drafted)
    assert not drafter.misjudged


@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize("width", [1, 4])
def test_only_groups_with_an_expert_that_a_token_takes_are_called(both: Pair, width: int) -> None:
    """The witness is transformers' own choice."""
    _, build = both
    made, called = load(build), list[tuple[int, int]]()
    for i, part in enumerate(made.layers):
        part.experts[:] = [(counted(program, called, (i, j)), n) for j, (program, n) in enumerate(part.experts)]
    model, tokens = tiny.transformers_model(build.source), build.text[:32]
    with torch.no_grad(), observed(model) as chosen:
        model(torch.tensor([tokens]), use_cache=False)
    size = made.layers[0].experts[0][1]
    for at in range(0, len(tokens), width):
        called.clear()
        places = range(at, at + width)
        made.forward(tokens[at : at + width], places, places)
        taken = {(i, int(e) // size) for i, rows in chosen.items() for e in rows[at : at + width].flatten() if e >= 0}
        groups = len(made.layers[0].experts)
        assert sorted(called) == sorted((i, j) for i, j in taken if j < groups)  # ZAYA's last class is no expert


def counted(program: Any, called: list[tuple[int, int]], place: tuple[int, int]) -> Any:
    """The program, which takes down that it was called."""

    def call(given: Any) -> Any:
        called.append(place)
        return program(given)

    return call
