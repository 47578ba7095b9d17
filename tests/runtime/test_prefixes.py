"""Copies of what real programs keep: slots, rings and taps come back as they were, in every form, in either process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import program_forms
import pytest
import tiny
from bench.folder import build_folder
from drafted_decoding import PrefixCache, Session, create_drafter, run
from drafted_decoding.policies import AlwaysDraft
from drafted_decoding.prefixes import BLOCK
from kit_runner.figures import relative_error
from models import tiny_families

from shardmill.errors import ShardmillError
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.machine import is_portable
from shardmill.runtime.engine import Engine
from shardmill.runtime.kv import FOLDED, KVLayout
from shardmill.runtime.process import start_engine

CONTEXT, NEW, PLENTY = 192, 8, 10**9
OTHER = "made by another engine or version"
FORMS: dict[str, dict[str, Any]] = {
    "fixed": program_forms.FORMS["fixed"] | {"contexts": [96]},
    "fixed, host": program_forms.FORMS["fixed, host"] | {"contexts": [96]},
}
FAMILIES = {  # the forms of each
    "phi3": ["fixed", "fixed, host"],  # plain slots
    "gemma3_text": ["fixed"],  # rings of sliding layers
    "lfm2": ["fixed, host"],  # rings of convolutions
    "gemma4_text": ["fixed, host"],  # rings, and layers that share caches
    "qwen3_5_text": ["fixed", "fixed, host"],  # recurrences
    "nemotron_h": ["fixed", "fixed, host"],
    "zaya": ["fixed"],  # rings of queries and keys
}


@pytest.mark.usefixtures("fp32")
def test_a_copy_comes_back_as_it_was(built: tiny.Build) -> None:
    """To the bit: the passes after it give the same logits, and another text between leaves nothing."""
    engine, text = program_forms.load(built), list(built.text)

    def fed(tokens: list[int], start: int) -> np.ndarray:
        spans = [range(at, at + 4) for at in range(start, len(tokens), 4)]
        return np.concatenate([engine.forward([tokens[p] for p in span], span, span) for span in spans])

    fed(text[:40], 0)
    rest = fed(text, 40)
    taps = np.random.default_rng(1).random((tiny.CONTEXT, 6)).astype(np.float16)  # as if a drafter read them
    engine.taps = taps.copy()
    position, others = engine.copy_bytes()
    sizes = engine.copy_out({7: (0, 32), 8: (32, 40)})
    assert others == 0 and sizes == {7: 32 * position, 8: 8 * position}
    engine.reset()
    fed(text[::-1], 0)
    engine.reset()
    engine.taps[:] = 0
    engine.copy_in([7, 8])
    assert np.array_equal(fed(text, 40), rest)
    assert np.array_equal(engine.taps[:40], taps[:40]) and not engine.taps[40:].any()
    engine.drop_copies([7, 8])
    assert not engine.copies


@pytest.mark.thorough
@pytest.mark.usefixtures("fp32")
def test_conversations_in_another_process(built: tiny.Build, tmp_path: Path) -> None:
    """The copies stay there; only their sizes cross the wire."""
    engine = start_engine(build_folder(built, tmp_path), "fp32")
    prompts = [list(built.text[:40]), list(built.text[20:44])]
    alone = [run(Session(engine), prompt, max_new_tokens=NEW).tokens for prompt in prompts]
    prefixes = PrefixCache(engine, PLENTY)
    session = Session(engine, prefixes=prefixes)
    found = [run(session, prompts[i % 2], max_new_tokens=NEW) for i in range(4)]
    assert [one.tokens for one in found] == [*alone, *alone]
    assert [one.reused_tokens for one in found] == [0, 0, BLOCK, 0]  # the shorter one has no whole block
    assert prefixes.bytes > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("fp32")
def test_a_saved_text_comes_back_in_another_process(built: tiny.Build, tmp_path: Path) -> None:
    """To the bit; a file that is damaged, or of another text, model or engine, is refused in one line."""
    (tmp_path / "build").mkdir()
    folder, file, text = build_folder(built, tmp_path / "build"), tmp_path / "kept" / "file", list(built.text[:40])
    prompt = [*text, *built.text[20:24]]
    engines = [start_engine(folder, "fp32") for _ in range(2)]
    said, kept = [], []
    for engine in engines:
        prefixes = PrefixCache(engine, PLENTY)
        session = Session(engine, prefixes=prefixes)
        if not file.exists():
            session.prefill(text)
            session.keep()
            prefixes.save(text, file)
        else:
            prefixes.load(text, file)
        kept.append(prefixes.bytes)
        session.prefill(list(built.text[::-1]))  # other content in the slots
        said.append(session.prefill(prompt))
    assert said[0].reused == said[1].reused == BLOCK and kept[0] == kept[1] > 0
    assert np.array_equal(said[0].row, said[1].row)

    def refused(engine: Any, tokens: list[int]) -> str:
        with pytest.raises(ShardmillError) as caught:
            PrefixCache(engine, PLENTY).load(tokens, file)
        return str(caught.value)

    engine = engines[1]
    assert refused(engine, [*text[:-1], text[-1] + 1]).endswith(OTHER)
    assert refused(program_forms.load(built), text).endswith(OTHER)  # whose manifest has other paths
    fp16 = start_engine(folder, "fp16")
    assert refused(fp16, text).endswith(OTHER)
    whole = file.read_bytes()
    for place in (3, 60, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = refused(engine, text)
        assert found.startswith(f"{file}: ") and "\n" not in found
    for damaged in (b"", whole[:-1], whole + b"1"):
        file.write_bytes(damaged)
        refused(engine, text)
    with pytest.raises(FileNotFoundError):
        PrefixCache(engine, PLENTY).load(text, tmp_path / "none")


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """A family's programs in each form."""
    folder, family = tmp_path_factory.mktemp("prefixes"), request.param
    checkpoint = folder / "checkpoint"
    written = tiny.write_checkpoint(checkpoint) if family == "phi3" else tiny_families.write_tiny(family, checkpoint)
    source, found = tiny.fetched(written, folder / "source"), {}
    changes = {"context": CONTEXT} | ({} if family == "phi3" else {"topology": "auto", "head": {"slices": 1}})
    for name in FAMILIES[family]:
        (folder / name).mkdir()
        found[name] = program_forms.load(program_forms.build(source, folder / name, FORMS[name], **changes))
    yield found


@pytest.mark.slow
@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_every_family_and_form_says_in_turns_what_it_says_alone(engines: dict[str, Engine]) -> None:
    """With budgets for all and for some, drafts, and lengths of context that are left and entered again."""
    for name, engine in engines.items():
        rng = random.Random(5)
        system = [rng.randrange(1, engine.vocab) for _ in range(70)]
        plain, scripts = Session(engine), []
        texts = [[*system, i + 1] for i in range(5)]
        for _ in range(15):
            which = rng.randrange(5)
            prompt = [*texts[which], *(rng.randrange(1, engine.vocab) for _ in range(rng.randrange(1, 9)))]
            if len(prompt) > CONTEXT - 20:
                prompt = texts[which][:60]
            plain.truncate(0)
            said = run(plain, prompt, max_new_tokens=NEW).tokens
            texts[which] = [*prompt, *said]
            scripts.append((prompt, said))
        position, rest = engine.copy_bytes()
        assert (rest > 0) == bool(engine.host.window_slots or engine.host.taps or engine.host.recurrent)
        assert engine.undoable(0) == (engine.host.recurrent or {}).get("block")
        for budget in (PLENTY, (position * 120 + rest) * 3):
            prefixes, helper = PrefixCache(engine, budget), create_drafter("suffix")
            session = Session(engine, prefixes=prefixes)
            for prompt, said in scripts:
                assert run(session, prompt, max_new_tokens=NEW, drafter=helper, policy=AlwaysDraft()).tokens == said, (
                    name
                )
                held = sum(copy.nbytes for copy in engine.copies.values())
                assert held == prefixes.bytes <= budget
            assert prefixes.hits > 0
            prefixes.clear()
            assert not engine.copies


@pytest.mark.slow
@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_every_family_and_form_goes_on_from_a_file(engines: dict[str, Engine], tmp_path: Path) -> None:
    """As from the copies that were written to it."""
    for engine in engines.values():
        rng = random.Random(6)
        system, other = ([rng.randrange(1, engine.vocab) for _ in range(75)] for _ in range(2))
        prompt = [*system, *other[:5]]
        found = []
        for later in (False, True):
            prefixes = PrefixCache(engine, PLENTY)
            session = Session(engine, prefixes=prefixes)
            if later:
                prefixes.load(system, tmp_path / "file")
            else:
                session.prefill(system)
                session.keep()
                prefixes.save(system, tmp_path / "file")
            session.prefill(other)
            found.append(session.prefill(prompt))
            prefixes.clear()
        assert found[0].reused == found[1].reused >= 64
        assert np.array_equal(found[0].row, found[1].row)


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass from now on."""
    passes: list[int] = []
    hidden = engine.hidden

    def counting(tokens: Any, *rest: Any) -> Any:
        passes.append(len(tokens))
        return hidden(tokens, *rest)

    monkeypatch.setattr(engine, "hidden", counting)
    return passes


@pytest.mark.slow
@pytest.mark.parametrize("engines", ["qwen3_5_text", "nemotron_h"], indirect=True)
@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_a_chat_of_three_turns_goes_on_from_copies(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chat takes the slots between its turns, and the first half of an answer, its thoughts, is left out."""
    for engine in engines.values():
        rng, passes, turns = random.Random(3), counted(engine, monkeypatch), []
        prefixes = PrefixCache(engine, PLENTY)
        session, fresh = Session(engine, prefixes=prefixes), Session(engine)
        talks = [[rng.randrange(1, engine.vocab) for _ in range(40)] for _ in range(2)]
        known = [0, 0]  # tokens of each chat's last prompt
        for _ in range(3):
            for i, talk in enumerate(talks):
                talk.extend(rng.randrange(1, engine.vocab) for _ in range(5))
                passes.clear()
                said = run(session, talk, max_new_tokens=NEW)
                assert said.reused_tokens == known[i]
                turns.append((list(talk), said, len(passes)))
                known[i] = len(talk)
                talk.extend(said.tokens[NEW // 2 :])
        for prompt, said, count in turns:
            fresh.truncate(0)
            passes.clear()
            assert run(fresh, prompt, max_new_tokens=NEW).tokens == said.tokens
            assert len(passes) - count >= said.reused_tokens // engine.tokens_max  # passes saved
        position, rest = engine.copy_bytes()
        ends = sum(copy.rings is not None for copy in engine.copies.values())
        tokens = sum(copy.stop - copy.start for copy in engine.copies.values())
        assert ends >= len(turns) and prefixes.bytes == tokens * position + ends * rest
        prefixes.clear()


@pytest.mark.slow
@pytest.mark.parametrize("engines", ["qwen3_5_text", "nemotron_h"], indirect=True)
@pytest.mark.parametrize("off", [0, -1, 1])
@pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
def test_a_copy_of_another_position_is_found_out(
    engines: dict[str, Engine], off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that the state lacks, or that is folded twice, shows in the next logits."""
    restore = KVLayout.restore

    def shifted(self: KVLayout, start: int, stop: int, rings: Mapping[str, Any] | None = None) -> None:
        moved = None if rings is None else {**rings, FOLDED: rings[FOLDED] + off}
        restore(self, start, stop, moved)

    for engine in engines.values():
        rng, prefixes = random.Random(4), PrefixCache(engine, PLENTY)
        first, second = ([rng.randrange(1, engine.vocab) for _ in range(45)] for _ in range(2))
        longer = [*first, *second[:6]]
        fresh = Session(engine).prefill(longer)
        engine.reset()
        session = Session(engine, prefixes=prefixes)
        session.prefill(first)
        session.prefill(second)
        with monkeypatch.context() as patch:
            patch.setattr(KVLayout, "restore", shifted)
            found = session.prefill(longer)
        assert found.reused == len(first)
        error = relative_error(found.row[None], fresh.row[None])
        assert (error > THRESHOLDS["program_error"].limit) == (off != 0), error
        prefixes.clear()
