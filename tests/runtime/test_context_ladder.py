"""A model with several lengths of context says what it says with one, whatever lies at the edge where it moves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import drafted_decoding as decode
import limits
import numpy as np
import program_forms
import pytest
import tiny
from drafted_decoding import DRAFTERS, Session, create_drafter
from drafted_decoding.drafters import TRAINED
from drafted_decoding.policies import AlwaysDraft
from models import tiny_families

from shardmill.errors import ShardmillError
from shardmill.gates.passes import at_lengths, in_passes
from shardmill.gates.stack import feed
from shardmill.machine import is_portable
from shardmill.runtime.engine import Engine
from shardmill.runtime.program import Program

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have"),
    pytest.mark.slow,
]
NEW, SEED = 26, 11
TOKENS = {"max": 4}
CONTEXT = 64
CASES: dict[str, dict[str, list[int]]] = {  # the shorter contexts by family and form
    "phi3": {"fixed": [40, 48], "fixed, host": [40, 48]},  # plain attention over all slots
    "gemma3_text": {"fixed": [40]},  # rings of sliding layers
    "lfm2": {"fixed, host": [40]},  # rings of convolutions
    "qwen3_5_text": {"fixed": [40], "fixed, host": [40]},  # recurrences
    "nemotron_h": {"fixed": [40], "fixed, host": [40]},
}


@dataclass(frozen=True)
class Ladder:
    """One model: an engine for its whole context alone, those with several lengths, and texts."""

    whole: Engine
    engines: dict[str, Engine]  # by form
    draft: Engine
    prompts: list[list[int]]
    limit: limits.Limit


@pytest.fixture(scope="module", params=CASES)
def ladder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ladder]:
    """A family in the whole context alone, and with shorter ones."""
    folder, family = tmp_path_factory.mktemp("ladder"), request.param
    wanted = folder / "checkpoint"
    written = tiny.write_checkpoint(wanted) if family == "phi3" else tiny_families.write_tiny(family, wanted)
    source = tiny.fetched(written, folder / "source")
    changes = {"tokens": TOKENS} | ({} if family == "phi3" else {"topology": "auto", "head": {"slices": 1}})
    builds = {}
    shorter = {form: program_forms.FORMS[form] | {"contexts": slots} for form, slots in CASES[family].items()}
    for name, program in {"whole": program_forms.FORMS["fixed"], **shorter}.items():
        (folder / name).mkdir()
        builds[name] = program_forms.build(source, folder / name, program, **changes)
    engines = {name: program_forms.load(build) for name, build in builds.items()}
    whole = engines.pop("whole")
    rng = np.random.default_rng(SEED)
    first = rng.integers(1, whole.vocab, 30).tolist()
    # Over both edges; with a prefix of that; from the second length on; and one that repeats itself.
    prompts = [
        first,
        first[:19] + rng.integers(1, whole.vocab, 9).tolist(),
        rng.integers(1, whole.vocab, 45).tolist()[: CONTEXT - NEW],
        first[:6] * 4,
    ]
    limit = tiny_families.limit_of(tiny.transformers_model(source))
    yield Ladder(whole, engines, program_forms.load(builds["whole"], layers=1), prompts, limit)


def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the length of every pass of an engine."""
    found: list[int] = []
    run = engine.hidden

    def noted(*given: Any) -> np.ndarray:
        made = run(*given)
        found.append(engine.host.length)
        return made

    monkeypatch.setattr(engine, "hidden", noted)
    return found


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in TRAINED])  # test_drafter.py has those
def test_a_text_that_outgrows_its_slots_goes_on_as_if_it_had_had_them(
    ladder: Ladder, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session for all prompts, as in a server, so that prefixes are reused after a move, and drafts cross edges."""
    plain = [decode.run(Session(ladder.whole), prompt, max_new_tokens=NEW).tokens for prompt in ladder.prompts]
    for engine in ladder.engines.values():
        lengths = steps(engine, monkeypatch)
        session, helper = Session(engine), create_drafter(drafter, draft_session=Session(ladder.draft))
        found = [
            decode.run(session, prompt, max_new_tokens=NEW, drafter=helper, policy=AlwaysDraft())
            for prompt in ladder.prompts
        ]
        assert [one.tokens for one in found] == plain
        assert {*lengths} == {*engine.lengths} and sorted(lengths) != lengths  # it has moved up, and down again
        assert found[1].reused_tokens > 0 or engine.host.taps or engine.host.window_slots or engine.host.recurrent
        if drafter not in ("none", "draft_model"):
            assert sum(map(sum, (one.drafted for one in found))) > sum(map(sum, (one.accepted for one in found)))


def test_functions_of_a_length_are_loaded_when_it_is_first_needed(ladder: Ladder) -> None:
    """And no state of a length that was left stays."""
    for engine in ladder.engines.values():
        part = engine.layers[0].program
        engine.reset()
        part.models.clear()
        part.state = part._loaded(part.functions)
        assert [*part.models] == ["c40_t1", "c40_t4"]
        engine.forward([1], [39], [0])
        assert [*part.models] == ["c40_t1", "c40_t4"]
        engine.forward([1], [engine.slots - 1], [1])
        assert [*part.models] == ["c40_t1", "c40_t4", "t1", "t4"] and part.slots == engine.host.length == engine.slots


def test_what_moves_is_seen_and_what_is_given_up_is_not(ladder: Ladder) -> None:
    """Logits of a token after slots that were carried up, and after fewer that were carried down again."""
    text, at = ladder.prompts[0], range(4)
    for engine in ladder.engines.values():
        rows = []
        for one in (ladder.whole, engine):
            one.reset()
            for start in range(0, 28, 4):
                one.forward(text[start : start + 4], range(start, start + 4), range(start, start + 4))
            one.fit(CONTEXT)
            rows.append([one.forward([text[28]], [28], [28])])
            one.forward(text[: len(at)], [50, 51, 52, 53], [29, 30, 31, 32])
            one.forget([50, 51, 52, 53]) if one is ladder.whole else one.fit(40)
            rows[-1].append(one.forward([text[29]], [29], [29]))
            rows[-1].append(one.forward([text[0]], [one.slots - 1], [30]))  # at the whole context again
        assert engine.host.length == CONTEXT
        for mine, theirs in zip(rows[1], rows[0], strict=True):
            limits.rows_agree("logits", mine, theirs, ladder.limit)


def test_a_length_that_can_t_be_loaded_leaves_the_engine_where_it_was(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it held: a device may lack the memory for a while. A part before the one that fails goes back, too."""
    text = ladder.prompts[0]
    for engine in ladder.engines.values():
        last, loaded = engine.layers[-1].program, Program._loaded

        def failing(self: Program, functions: Any, last: Program = last, loaded: Any = loaded) -> Any:
            if self is last and functions is not last.functions:
                raise ShardmillError("no memory")
            return loaded(self, functions)

        engine.reset()
        engine.forward(text[:4], range(4), range(4))
        with monkeypatch.context() as patch:
            patch.setattr(Program, "_loaded", failing)
            with pytest.raises(ShardmillError, match="no memory"):
                engine.fit(CONTEXT)
        assert {part.program.slots for part in engine.layers} == {engine.host.length} == {40}
        found = [engine.forward([text[4]], [4], [4])]
        engine.fit(CONTEXT)
        found.append(engine.forward([text[5]], [5], [5]))
        ladder.whole.reset()
        ladder.whole.forward(text[:4], range(4), range(4))
        for place, logits in zip((4, 5), found, strict=True):
            expected = ladder.whole.forward([text[place]], [place], [place])
            limits.rows_agree(f"logits at {place}", logits, expected, ladder.limit)


def test_passes_of_the_gate_hold_for_every_kind_of_layer(ladder: Ladder) -> None:
    """Also those that fill a context to its last slot first: rings go by positions, and slots lie elsewhere."""
    text = (ladder.prompts[0] * 3)[:48]
    for engine in ladder.engines.values():
        plain = feed(engine, text, in_passes(len(text), [1]))
        for name, passes in at_lengths(len(text), engine.widths, engine.verify, engine.lengths).items():
            some = text[: passes[-1].positions[-1] + 1]
            limits.rows_agree(name, feed(engine, some, passes), plain[: len(some)], ladder.limit)
