"""Many conversations in turns say what each says alone, whatever is copied out and in, and copies keep a budget."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted_decoding import ContextPolicy, Session, create_drafter, run
from drafted_decoding.policies import AlwaysDraft
from drafted_decoding.prefixes import BLOCK, PrefixCache
from numpy.typing import NDArray

from .scripted import HIDDEN, ScriptedEngine

A_POSITION, REST = 10, 500  # bytes of a copy
SLOTS, NEW = 320, 12
PLENTY = 10**9


class CopyingEngine(ScriptedEngine):
    """An engine that can copy its slots, and refuses copies that it was not given or that are not its to make."""

    rest = 0

    def __init__(self, **options: Any) -> None:
        self.copies: dict[int, Any] = {}
        self.most = 0  # bytes of copies at any time
        super().__init__(**options)

    def copy_bytes(self) -> tuple[int, int]:
        return A_POSITION, self.rest

    def copy_out(self, spans: Mapping[int, tuple[int, int]], rest: int | None = None) -> dict[int, int]:
        for key, (start, stop) in spans.items():
            assert key not in self.copies and self._position[start:stop] == list(range(start, stop))
            self.copies[key] = (start, stop, self._token[start:stop], self.read_rest() if key == rest else None)
        assert rest is None or rest in spans
        self.most = max(self.most, self.held())
        return {key: self.size(key) for key in spans}

    def copy_in(self, keys: Sequence[int]) -> None:
        for key in keys:
            start, stop, tokens, rest = self.copies[key]
            self._token[start:stop], self._position[start:stop] = tokens, range(start, stop)
            if rest is not None:
                self.write_rest(rest)

    def drop_copies(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self.copies[key]

    def save_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> None:
        file.write_bytes(pickle.dumps((list(tokens), [self.copies[key] for key in keys])))

    def load_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> dict[int, int]:
        text, copies = pickle.loads(file.read_bytes())
        assert text == list(tokens)
        self.copies |= dict(zip(keys, copies, strict=True))
        return {key: self.size(key) for key in keys}

    def size(self, key: int) -> int:
        start, stop, _, rest = self.copies[key]
        return A_POSITION * (stop - start) + (REST if rest is not None else 0)

    def held(self) -> int:
        return sum(map(self.size, self.copies))

    def read_rest(self) -> Any:
        return None

    def write_rest(self, rest: Any) -> None:
        raise AssertionError("no rest was asked for")


class RingEngine(CopyingEngine):
    """Beside the slots, a ring of the last positions, as sliding layers have; an answer depends on both."""

    rest, window = REST, 8

    def reset(self) -> None:
        super().reset()
        self._ring: dict[int, tuple[int, int]] = {}

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        assert self.rewindable(positions[0]), "a pass began where the ring has been overtaken"
        self._ring |= {p % (2 * self.window): (p, t) for p, t in zip(positions, tokens, strict=True)}
        return super().forward(tokens, slots, positions)

    def rewindable(self, position: int) -> bool:
        wanted = range(max(0, position - self.window + 1), position)
        return all(self._ring.get(p % (2 * self.window), (HIDDEN,))[0] == p for p in wanted)

    def _row(self, position: int) -> NDArray[np.float32]:
        seen = {p: t for p, t in self._ring.values() if position - self.window < p <= position}
        row = super()._row(position)
        row[random.Random(repr(sorted(seen.items()))).randrange(self.vocab)] += 3.0
        return row

    def read_rest(self) -> Any:
        return dict(self._ring)

    def write_rest(self, rest: Any) -> None:
        self._ring = dict(rest)


def keeping(engine: CopyingEngine, budget: int = PLENTY, policy: ContextPolicy = "stop") -> tuple[Session, PrefixCache]:
    """A session that keeps prefixes, and these."""
    prefixes = PrefixCache(engine, budget)
    return Session(engine, context_policy=policy, prefixes=prefixes), prefixes


KINDS = {"slots": CopyingEngine, "rings": RingEngine}
system = random.Random(0).choices(range(50), k=2 * BLOCK + 9)


def said_alone(kind: str, prompt: Sequence[int], policy: ContextPolicy = "stop") -> tuple[int, ...]:
    session = Session(KINDS[kind](slots=SLOTS, widths=(1, 2, 4)), context_policy=policy)
    return run(session, prompt, max_new_tokens=NEW).tokens


def talk(session: Session, kind: str, conversations: int, turns: int, seed: int = 1, shared: bool = True) -> int:
    """Random turns of conversations with one session, each compared; returns the tokens that were reused."""
    rng, reused = random.Random(seed), 0
    texts = [(system if shared else []) + [rng.randrange(50) for _ in range(1 + i % 7)] for i in range(conversations)]
    for _ in range(turns):
        which = rng.randrange(conversations)
        prompt = texts[which] + [rng.randrange(50) for _ in range(rng.randrange(1, 14))]
        if len(prompt) > SLOTS - 40:
            prompt = texts[which][: rng.randrange(1, 90)]  # an edited conversation
        drafter = create_drafter(rng.choice(["none", "ngram", "suffix"]))
        found = run(session, prompt, max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft())
        assert found.tokens == said_alone(kind, prompt)
        texts[which] = [*prompt, *found.tokens]
        reused += found.reused_tokens
    return reused


@pytest.mark.thorough(but=["8-slots", "8-rings"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conversations", [2, 8, 40])
def test_conversations_in_turns_say_what_each_says_alone(kind: str, conversations: int) -> None:
    """With room for all conversations, and with room for a few, where copies are freed all the time."""
    reused = {}
    for name, budget in {"none": 0, "some": 2 * (A_POSITION * 100 + REST), "plenty": PLENTY}.items():
        engine = KINDS[kind](slots=SLOTS, widths=(1, 2, 4))
        session, prefixes = keeping(engine, budget)
        reused[name] = talk(session, kind, conversations, 24 if conversations < 40 else 80)
        assert engine.most <= budget
        assert prefixes.bytes == engine.held()
        assert (prefixes.evicted > 0) == (name == "some")
    assert reused["none"] < reused["some"] <= reused["plenty"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_runs_only_what_is_new(kind: str) -> None:
    """After another conversation, from the last block on, or for a model with rings from the very end of the first."""
    engine = KINDS[kind](slots=SLOTS)
    session, prefixes = keeping(engine)
    first, other = [1, 2, 3] * 30, [4, 5, 6] * 20
    text = [*first, *run(session, first, max_new_tokens=NEW).tokens]
    run(session, other, max_new_tokens=NEW)
    found = run(session, [*text, 7, 8, 9], max_new_tokens=NEW)
    assert found.reused_tokens == (len(text) - 1 if kind == "rings" else (len(text) - 1) // BLOCK * BLOCK)
    assert found.tokens == said_alone(kind, [*text, 7, 8, 9])
    assert prefixes.hits == 1
    assert prefixes.recalled == found.reused_tokens


def test_a_branch_is_kept_by_the_second_text_for_the_third() -> None:
    """A ring can't go back to where two texts part, so the second runs its beginning again and is copied there."""
    session, _ = keeping(RingEngine(slots=SLOTS, widths=(1, 3, 12)))
    reused = [run(session, [*system, i, i], max_new_tokens=NEW).reused_tokens for i in range(4)]
    assert reused == [0, 0, 2 * BLOCK, 2 * BLOCK]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_begin_alike_share_copies(kind: str) -> None:
    engine = KINDS[kind](slots=SLOTS)
    session, prefixes = keeping(engine)
    for i in range(10):
        run(session, [*system, i, i], max_new_tokens=1)
    assert sum(stop - start == BLOCK for start, stop, _, _ in engine.copies.values()) == len(system) // BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_again_runs_its_last_token(kind: str) -> None:
    session, _ = keeping(KINDS[kind](slots=SLOTS))
    prompt = system[: 2 * BLOCK]
    for text in (prompt, [3, 2, 1], prompt):
        found = run(session, text, max_new_tokens=NEW)
        assert found.tokens == said_alone(kind, text)
    assert found.reused_tokens == len(prompt) - 1 and found.prefill_passes == 1


def test_a_private_text_is_not_kept() -> None:
    engine = CopyingEngine(slots=SLOTS)
    session, _ = keeping(engine)
    for _ in session.prefill_passes(system, private=True):
        pass
    session.prefill([1, 2, 3])
    assert not engine.copies
    session.prefill(system)
    session.prefill([1, 2, 3])
    assert len(engine.copies) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_other_weights_are_not_reused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under other weights the same tokens leave other contents in the slots."""
    monkeypatch.setattr(KINDS[kind], "adapt", lambda _, name: f"weights of {name}" if name else "", raising=False)
    session, _ = keeping(KINDS[kind](slots=SLOTS))
    reused = []
    for name in (None, "a", None, "a", "a"):
        session.use_adapter(name)
        reused.append(session.prefill(system).reused)
    again = len(system) - 1 if kind == "rings" else 2 * BLOCK
    assert reused == [0, 0, again, again, len(system) - 1]


def test_no_copy_is_made_before_the_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter may be asked for then, and a rest without a text would only take room."""
    monkeypatch.setattr(CopyingEngine, "adapt", lambda _, name: name or "", raising=False)
    session, prefixes = keeping(RingEngine(slots=SLOTS))
    session.use_adapter("a")
    assert prefixes.bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_recently_used_copies_go_first_and_beginnings_last(kind: str) -> None:
    text = A_POSITION * 3 * BLOCK + (2 * REST if kind == "rings" else 0)
    engine = KINDS[kind](slots=SLOTS)
    session, prefixes = keeping(engine, 2 * text + 40)
    a, b, c = ([i] * (3 * BLOCK + 1) for i in range(3))
    for prompt in (a, b, a, c, [9]):  # room for two: b goes
        session.prefill(prompt)
    assert prefixes.find(a).length >= 3 * BLOCK and prefixes.find(c).length >= 3 * BLOCK
    assert prefixes.find(b).known < 3 * BLOCK
    for node in prefixes._used.values():  # a beginning never goes before what follows it
        assert node.parent is not None and (node.parent.key == 0 or node.parent.key in prefixes._used)


def test_a_text_larger_than_the_budget_keeps_its_beginning() -> None:
    """For a model with rings a beginning alone is of no use, and nothing is copied."""
    engine = CopyingEngine(slots=SLOTS)
    session, prefixes = keeping(engine, A_POSITION * BLOCK * 2 + 5)
    prompt = [random.Random(5).randrange(50) for _ in range(200)]
    for text in (prompt, [1]):
        session.prefill(text)
    assert prefixes.find(prompt).length == 2 * BLOCK
    ring = RingEngine(slots=SLOTS)
    session, _ = keeping(ring, A_POSITION * BLOCK * 2 + 5)
    for text in (prompt, [1]):
        session.prefill(text)
    assert not [one for one in ring.copies.values() if one[1] - one[0] == BLOCK]


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_that_has_slid_is_not_kept(kind: str) -> None:
    """Its positions have other slots; before that it is kept as any other."""
    rng = random.Random(3)
    engine = KINDS[kind](slots=SLOTS, widths=(1, 2, 4))
    session, prefixes = keeping(engine, policy="slide")
    texts = [[rng.randrange(50) for _ in range(length)] for length in (SLOTS + 70, 90, SLOTS - 8, 90)]
    for text in [*texts, *texts[::-1], texts[1] + [3, 4, 5]]:
        assert run(session, text, max_new_tokens=NEW).tokens == said_alone(kind, text, "slide")
    assert prefixes.hits > 0


def test_clear_frees_all_copies() -> None:
    engine = RingEngine(slots=SLOTS)
    session, prefixes = keeping(engine)
    for text in (system, [1, 2, 3], [*system, 4]):
        session.prefill(text)
    assert engine.copies
    prefixes.clear()
    assert not engine.copies and prefixes.bytes == 0 and prefixes.find(system).known == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK, 2 * BLOCK + 9])
def test_a_text_is_saved_and_loaded_as_it_was_kept(kind: str, length: int, tmp_path: Path) -> None:
    """A later engine goes on from the file; texts of which only a part is kept are not saved."""
    file, text = tmp_path / "file", system[:length]
    session, prefixes = keeping(KINDS[kind](slots=SLOTS, widths=(1, 2, 4)))
    session.prefill(text)
    session.keep()
    prefixes.save(text, file)
    later, found = keeping(KINDS[kind](slots=SLOTS, widths=(1, 2, 4)))
    found.load(text, file)
    assert found.bytes == prefixes.bytes
    prompt = [*text, 3, 1, 4]
    said = run(later, prompt, max_new_tokens=NEW)
    assert said.tokens == said_alone(kind, prompt)
    assert said.reused_tokens == (length if kind == "rings" else length // BLOCK * BLOCK)
    file.unlink()
    session, prefixes = keeping(KINDS[kind](slots=SLOTS, widths=(1, 2, 4)), A_POSITION * (length - 1))
    session.prefill(text)
    session.keep()
    prefixes.save(text, file)
    assert not file.exists() or length % BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_keeps_the_budget(kind: str, tmp_path: Path) -> None:
    session, prefixes = keeping(KINDS[kind](slots=SLOTS))
    session.prefill(system)
    session.keep()
    prefixes.save(system, tmp_path / "file")
    later, found = keeping(KINDS[kind](slots=SLOTS), A_POSITION * BLOCK)
    found.load(system, tmp_path / "file")
    assert found.bytes <= A_POSITION * BLOCK
    assert run(later, system, max_new_tokens=NEW).tokens == said_alone(kind, system)
