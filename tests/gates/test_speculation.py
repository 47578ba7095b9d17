"""The stack's gate sees a wrong acceptance loop, on real programs; a sound one passes it."""

from __future__ import annotations

import sys

import pytest
import tiny
from decode.scripted import ScriptedEngine
from decode.test_mutants import bonus_from_the_wrong_row, seeds_loop

from shardmill.errors import GateError
from shardmill.gates.stack import mismatches

from . import judged

PROMPT = (2, 1, 0, 1, 2)
LOOPS = [seeds_loop, bonus_from_the_wrong_row]


def test_a_sound_loop_changes_nothing_and_meets_right_and_wrong_drafts() -> None:
    wrong, detail = mismatches(ScriptedEngine(), PROMPT)
    accepted, drafted = (int(detail.split()[i]) for i in (0, 2))
    assert wrong == 0
    assert 0 < accepted < drafted


@pytest.mark.parametrize("verify", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("slots", [32, 45, 46, 48, 64, 72, 256])
def test_a_sound_loop_passes_whatever_it_may_draft(verify: int, slots: int) -> None:
    """Near the end of the text or of the context a pass has no room for drafts, and asks for none."""
    engine = ScriptedEngine(slots=slots, widths=range(1, verify + 1))
    assert mismatches(engine, PROMPT)[0] == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_a_wrong_loop_changes_the_text(monkeypatch: pytest.MonkeyPatch, loop: object) -> None:
    monkeypatch.setattr(sys.modules["drafted_decoding.generate"], "accept", loop)
    assert mismatches(ScriptedEngine(), PROMPT)[0] > 0


@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_wrong_loop_holds_the_model_back(built: tiny.Build, monkeypatch: pytest.MonkeyPatch, loop: object) -> None:
    monkeypatch.setattr(sys.modules["drafted_decoding.generate"], "accept", loop)
    with pytest.raises(GateError, match="speculation_mismatches is "):
        judged.whole(built)
