"""A model with several lengths of context says what it says with one, whatever lies at the edge where it moves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import program_forms
import pytest
import tiny
from models import tiny_families

from shardmill import decode
from shardmill.decode import DRAFTERS, Session, create_drafter
from shardmill.decode.policies import AlwaysDraft
from shardmill.machine import is_portable
from shardmill.runtime.engine import Engine

pytestmark = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
NEW, SEED = 26, 11
TOKENS = {"max": 4}
LENGTHS = (40, 48, 64)


@dataclass(frozen=True)
class Ladder:
    """One model: an engine for its whole context alone, those with several lengths, and texts."""

    whole: Engine
    engines: dict[str, Engine]
    builds: dict[str, tiny.Build]  # "whole" and the others
    draft: Engine
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=["phi3", "gemma3_text", "lfm2"])
def ladder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ladder]:
    """Plain attention over all slots, rings of sliding layers, or rings of convolutions."""
    folder, family = tmp_path_factory.mktemp("ladder"), request.param
    wanted = folder / "checkpoint"
    written = tiny.write_checkpoint(wanted) if family == "phi3" else tiny_families.write_tiny(family, wanted)
    source = tiny.fetched(written, folder / "source")
    changes = {"tokens": TOKENS} | ({} if family == "phi3" else {"topology": "auto", "head": {"slices": 1}})
    builds = {}
    for name, program in {"whole": program_forms.FORMS["fixed"], **program_forms.LADDERS}.items():
        (folder / name).mkdir()
        builds[name] = program_forms.build(source, folder / name, program, folder / "cache", **changes)
    engines = {name: program_forms.load(build) for name, build in builds.items()}
    whole = engines.pop("whole")
    rng = np.random.default_rng(SEED)
    first = rng.integers(1, whole.vocab, 30).tolist()
    # Over both edges; with a prefix of that; from the second length on; and one that repeats itself.
    prompts = [
        first,
        first[:19] + rng.integers(1, whole.vocab, 9).tolist(),
        rng.integers(1, whole.vocab, 45).tolist()[: 64 - NEW],
        first[:6] * 4,
    ]
    yield Ladder(whole, engines, builds, program_forms.load(builds["whole"], layers=1), prompts)


def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the length of every pass of an engine."""
    found: list[int] = []
    run = engine.hidden

    def noted(tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        made = run(tokens, slots, positions)
        found.append(engine.host.length)
        return made

    monkeypatch.setattr(engine, "hidden", noted)
    return found


@pytest.mark.parametrize("form", program_forms.LADDERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_that_outgrows_its_slots_goes_on_as_if_it_had_had_them(
    ladder: Ladder, form: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session for all prompts, as in a server, so that prefixes are reused after a move, and drafts cross edges."""
    engine = ladder.engines[form]
    lengths = steps(engine, monkeypatch)
    session, helper = Session(engine), create_drafter(drafter, draft_session=Session(ladder.draft))
    said, drafted, accepted = [], 0, 0
    for prompt in ladder.prompts:
        one = decode.run(session, prompt, max_new_tokens=NEW, drafter=helper, policy=AlwaysDraft())
        said.append(one.tokens)
        drafted, accepted = drafted + sum(one.drafted), accepted + sum(one.accepted)
    plain = [decode.run(Session(ladder.whole), prompt, max_new_tokens=NEW).tokens for prompt in ladder.prompts]
    assert said == plain
    assert {*lengths} == {*LENGTHS} and sorted(lengths) != lengths  # it has moved up, and down again
    assert drafter in ("none", "draft_model") or drafted > accepted
