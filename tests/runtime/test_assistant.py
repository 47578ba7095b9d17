"""An assistant on its own programs: its drafts and their accepted counts are transformers', and texts stay the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import assistants
import numpy as np
import pytest
from assistants import VOCAB, Round
from drafted_decoding import Session, create_drafter, run
from drafted_decoding.drafters.assistant import AssistantDrafter
from drafted_decoding.policies import AlwaysDraft
from drafting import Recorded, loaded

from shardmill.runtime.drafter import load_drafter
from shardmill.runtime.engine import Engine

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
NEW = 40


def prompt(seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, 5 + 6 * (seed % 2))]


def compared(model: Any, helper: Any, engine: Engine, seed: int) -> list[Round]:
    """Our rounds, which must be transformers', and the text must be plain greedy decoding's."""
    plain = run(Session(engine), prompt(seed), max_new_tokens=NEW)
    drafter = Recorded(AssistantDrafter(load_drafter(engine)))
    found = run(Session(engine), prompt(seed), max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft())
    text, rounds = assistants.theirs(model, helper, prompt(seed), NEW)
    assert list(found.tokens) == list(plain.tokens) == text
    assert [Round(len(text), draft, accepted) for text, draft, accepted in drafter.rounds if draft] == rounds
    return rounds


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "E2B": ("gemma4_text", {}),
    "12B": ("gemma4_unified_text", {}),
    "functions for two contexts": ("gemma4_text", {"shapes": "fixed", "contexts": [40]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_drafts_and_accepted_counts_are_those_of_transformers(tmp_path: Path, form: str) -> None:
    """Also in texts that outgrow the window, and a shorter context."""
    kind, program = FORMS[form]
    model, helper = assistants.target(kind), assistants.assistant(kind, seed=2 if form == "12B" else 3)
    build = assistants.build(tmp_path, model, helper, program=assistants.STATE | program)
    engine = loaded(build, tmp_path)
    rounds = [one for seed in range(2) for one in compared(model, helper, engine, seed)]
    assert len(rounds) >= 20 and {one.accepted for one in rounds} >= {0, 1}
    assert not program or engine.host.length == 64


def test_a_draft_needs_the_model_s_pass_before_it() -> None:
    """A text whose last token is not the one after the last pass is not drafted for."""

    class Silent:
        def draft(self, token: int, position: int, count: int) -> tuple[list[int], list[float]]:
            asked.append((token, position, count))
            return [], []

    asked: list[tuple[int, int, int]] = []
    drafter = create_drafter("assistant", head=Silent())
    drafter.reset([5, 6])
    assert drafter.propose([5, 6, 7], 0).tokens == drafter.propose([5, 6, 7], 4).tokens == ()
    assert asked == [(7, 2, 4)]
