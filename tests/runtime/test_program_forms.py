"""All forms of a model's programs say the same: whatever drafts, however a text is cut, whatever was fed before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

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
from shardmill.machine import is_portable
from shardmill.runtime.engine import Engine

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have"),
    pytest.mark.slow,
]
NEW, SEED = 20, 11
TOKENS = {"max": 4}
WIDTHS = ((1,), (4,), (3, 1), (2, 4, 1, 3))


@dataclass(frozen=True)
class Forms:
    """One model: an engine for each form of its programs, and texts."""

    engines: dict[str, Engine]
    draft: Engine  # of another model, with the same vocabulary
    prompts: list[list[int]]
    limit: limits.Limit


def checkpoint(family: str, folder: Path) -> Path:
    """A small one: plain attention over all slots, rings of sliding layers, rings of convolutions, or recurrences."""
    return tiny.write_checkpoint(folder) if family == "phi3" else tiny_families.write_tiny(family, folder)


@pytest.fixture(scope="module", params=["phi3", "gemma3_text", "lfm2", "qwen3_5_text", "nemotron_h"])
def forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    folder = tmp_path_factory.mktemp("forms")
    source = tiny.fetched(checkpoint(request.param, folder / "checkpoint"), folder / "source")
    changes = {} if request.param == "phi3" else {"topology": "auto", "head": {"slices": 1}}
    engines = {}
    for form in program_forms.FORMS:
        (folder / form).mkdir()
        made = program_forms.build(source, folder / form, program_forms.FORMS[form], tokens=TOKENS, **changes)
        engines[form] = program_forms.load(made)
    rng, vocab = np.random.default_rng(SEED), engines["range"].vocab
    first = rng.integers(1, vocab, 30).tolist()
    # The second shares a prefix with the first; the third repeats itself, so that drafts are right at times.
    draft = program_forms.load(made, layers=1)  # of phi3 the first of three parts, of the others all there is
    prompts = [first, first[:19] + rng.integers(1, vocab, 9).tolist(), first[:6] * 4]
    yield Forms(engines, draft, prompts, tiny_families.limit_of(tiny.transformers_model(source)))


def fed(engine: Engine, tokens: Sequence[int], widths: Sequence[int]) -> np.ndarray:
    """Logits [n, V] of all tokens, in passes of these widths in turn."""
    engine.reset()
    rows, at = [], 0
    for width in itertools.cycle(widths):
        if at >= len(tokens):
            return np.concatenate(rows)
        positions = range(at, min(at + width, len(tokens)))
        rows.append(engine.forward(tokens[at : positions.stop], positions, positions))
        at = positions.stop


@pytest.mark.parametrize("form", program_forms.FORMS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_passes_of_any_widths_give_the_rows_of_single_tokens(forms: Forms, form: str, widths: Sequence[int]) -> None:
    """Those that a form has no function for too: they are filled up."""
    text = forms.prompts[0]
    expected = fed(forms.engines["range"], text, [1])
    limits.rows_agree(f"{form}, {widths}", fed(forms.engines[form], text, widths), expected, forms.limit)


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in TRAINED])  # test_drafter.py has those
def test_every_form_says_the_same_whatever_drafts(forms: Forms, drafter: str) -> None:
    """One session for all prompts, as in a server, so that prefixes are reused and wrong drafts lie in the slots."""
    said: dict[str, list[tuple[int, ...]]] = {}
    for form, engine in forms.engines.items():
        session, helper = Session(engine), create_drafter(drafter, draft_session=Session(forms.draft))
        found = [
            decode.run(session, prompt, max_new_tokens=NEW, drafter=helper, policy=AlwaysDraft())
            for prompt in forms.prompts
        ]
        said[form] = [one.tokens for one in found]
        assert found[1].reused_tokens > 0 or engine.host.taps or engine.host.window_slots or engine.host.recurrent
        if drafter not in ("none", "draft_model"):
            assert sum(map(sum, (one.drafted for one in found))) > sum(map(sum, (one.accepted for one in found)))
    plain = [decode.run(Session(forms.engines["range"]), prompt, max_new_tokens=NEW).tokens for prompt in forms.prompts]
    assert said == dict.fromkeys(program_forms.FORMS, plain)


@pytest.mark.parametrize("form", ["fixed", "enumerated, host"])
def test_a_pass_that_is_too_wide_is_refused(forms: Forms, form: str) -> None:
    engine, at = forms.engines[form], range(5)
    engine.reset()
    with pytest.raises(ShardmillError, match="a pass of 5 tokens: the program takes 4 at most"):
        engine.forward([1] * 5, at, at)


def test_a_program_of_fixed_widths_is_loaded_once_for_each(forms: Forms) -> None:
    """And all of its functions have one state."""
    program = forms.engines["fixed"].layers[0].program
    assert list(program.models) == ["t1", "t4"]
    assert not forms.engines["range"].layers[0].program.functions
    listed = forms.engines["enumerated, host"].layers[0].program
    assert list(listed.models) == [""] and sorted(listed.functions) == [1, 4]


@pytest.mark.parametrize("form", [name for name in program_forms.FORMS if name.endswith("host")])
def test_the_host_holds_what_the_states_would(forms: Forms, form: str) -> None:
    """After passes of several widths: every cache, slot by slot, and no program has a state."""
    for name in ("range", form):
        for part in forms.engines[name].layers:  # or slots that this text does not reach hold what others left there
            part.program.renew()
        fed(forms.engines[name], forms.prompts[0], [3, 1])
    for kept, held in zip(forms.engines["range"].layers, forms.engines[form].layers, strict=True):
        assert held.program.state is None and held.program.held is not None
        for name in held.program.held.arrays:
            mine, theirs = held.program.kept(name), kept.program.kept(name)
            assert np.abs(theirs).max() > 0
            limits.numbers_agree(name, mine, theirs, forms.limit)


def test_a_prompt_leaves_out_programs_that_keep_nothing(tmp_path: Path) -> None:
    """Gemma 4's last layers only read caches: a pass that gives no logits runs the layers before them alone."""
    source = tiny.fetched(tiny_families.write_tiny("gemma4_text", tmp_path / "checkpoint"), tmp_path / "source")
    form = program_forms.FORMS["fixed, host"]
    built = program_forms.build(source, tmp_path, form, topology="auto", head={"slices": 1})
    engine, text, runs = program_forms.load(built), [5, 77, 130, 9, 200, 31, 8, 64], list[str]()
    for part in engine.layers:
        part.program.around = lambda name=part.name: nullcontext(runs.append(name))
    engine.forward(text[:4], range(4), range(4))
    after = engine.forward(text[4:], range(4, 8), range(4, 8))
    assert runs == ["layers_00_04", "layers_04_08"] * 2
    engine.reset()
    engine.write(text[:4], range(4), range(4))
    assert runs[4:] == ["layers_00_04"]
    assert np.array_equal(engine.forward(text[4:], range(4, 8), range(4, 8)), after)
