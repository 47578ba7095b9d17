"""Tokens beyond the vocabulary: an engine's own vectors in a prompt, such as the rows of a picture.

The session, the sampler, the text, kept prefixes and drafters take them, none is ever generated or drafted, and two
that differ are never the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from drafted_decoding import DecodeError, Options, Sampling, Session, create_drafter, run
from drafted_decoding.drafters import BY_ITSELF, Draft
from drafted_decoding.drafters.assistant import AssistantDrafter
from drafted_decoding.drafters.follow import Numbering
from drafted_decoding.drafters.head import HeadDrafter
from drafted_decoding.drafters.learned import LearnedDrafter
from drafted_decoding.policies import AlwaysDraft
from drafted_decoding.prefixes import PrefixCache
from numpy.typing import NDArray

from .scripted import OracleDrafter, repetitive
from .test_prefixes import PLENTY, CopyingEngine, RingEngine

VOCAB, NEW = 50, 24
PICTURES = [[(1 << 61) + 1000 * k + i for i in range(40)] for k in range(2)]
BEFORE, AFTER = list(range(9)), [11, 12, 13, 11, 12, 13, 11, 12]


class KnowingEngine(CopyingEngine):
    """Knows the rows of two pictures, and no others."""

    beyond = True

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        strange = [t for t in tokens if t >= VOCAB and not any(t in picture for picture in PICTURES)]
        if strange:
            raise KeyError(strange[0])
        return super().forward(tokens, slots, positions)


class KnowingRings(KnowingEngine, RingEngine):
    """Knows them, too, and keeps a ring beside its slots."""


KINDS = [KnowingEngine, KnowingRings]


def engine(kind: type[KnowingEngine] = KnowingEngine) -> KnowingEngine:
    return kind(slots=320, widths=(1, 2, 4), vocab=VOCAB, next_token=repetitive(VOCAB, noise=4))


def prompt(*pictures: int) -> list[int]:
    return [*BEFORE, *(t for k in pictures for t in [*PICTURES[k], 20 + k]), *AFTER]


def alone(text: Sequence[int], kind: type[KnowingEngine] = KnowingEngine) -> tuple[int, ...]:
    return run(Session(engine(kind)), text, max_new_tokens=NEW).tokens


def test_pictures_decide_what_is_said() -> None:
    assert len({alone(prompt(*pictures)) for pictures in [(), (0,), (1,), (0, 1), (1, 0)]}) == 5


def test_an_engine_without_them_takes_none() -> None:
    session = Session(CopyingEngine(slots=320, widths=(1, 2, 4), vocab=VOCAB))
    with pytest.raises(DecodeError, match="a token outside the vocabulary of 50"):
        run(session, prompt(0), max_new_tokens=1)


def test_a_token_that_the_engine_does_not_know_is_its_to_refuse() -> None:
    with pytest.raises(KeyError):
        run(Session(engine()), [1, 1 << 62, 2], max_new_tokens=1)
    with pytest.raises(DecodeError, match="outside the vocabulary"):
        run(Session(engine()), [1, -1], max_new_tokens=1)


@pytest.mark.parametrize("kind", KINDS)
def test_one_picture_after_the_other_gets_its_own_answer(kind: type[KnowingEngine]) -> None:
    """With kept prefixes, in any order; what comes before a picture is shared, and so is the same picture again."""
    whole = engine(kind)
    prefixes = PrefixCache(whole, PLENTY)
    session = Session(whole, prefixes=prefixes)
    for pictures in [(0,), (1,), (0,), (0, 1), (1, 0), (0, 1), (1,)]:
        told = run(session, prompt(*pictures), max_new_tokens=NEW)
        assert told.tokens == alone(prompt(*pictures), kind)
        assert told.prompt_tokens == len(prompt(*pictures))
    assert told.reused_tokens >= 32


def test_prefix_keys_of_two_pictures_differ() -> None:
    whole = engine()
    prefixes = PrefixCache(whole, PLENTY)
    session = Session(whole, prefixes=prefixes)
    run(session, prompt(0), max_new_tokens=1)
    session.keep()
    assert prefixes.find(prompt(0)).length >= 32 and prefixes.find(prompt(1)).length == 0


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.5)]
)
@pytest.mark.parametrize("name", [*BY_ITSELF, "draft_model"])
def test_no_drafter_changes_the_answer_or_sees_them(name: str, sampling: Sampling) -> None:
    """A draft model is another model, which knows no pictures: it drafts by the text around them."""
    text, options = [*prompt(0, 1), *prompt(0, 1)], Options(sampling=sampling)
    wanted = run(Session(engine()), text, max_new_tokens=NEW, options=options).tokens
    other = CopyingEngine(slots=320, widths=(1, 2, 4), vocab=VOCAB, next_token=repetitive(VOCAB, noise=4))
    drafter = create_drafter(name, draft_session=Session(other), vocab=VOCAB)
    for _ in range(2):
        told = run(Session(engine()), text, max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft(), options=options)
        assert told.tokens == wanted or (name == "draft_model" and not sampling.greedy)
        assert all(0 <= t < VOCAB for t in told.tokens)
    assert name == "none" or sum(told.drafted) > 0


def test_a_table_of_earlier_texts_holds_none(tmp_path: Path) -> None:
    """A number of a row would be of no use in another process, and the table has room for the vocabulary alone."""
    drafter = LearnedDrafter()
    run(Session(engine()), prompt(0, 1), max_new_tokens=NEW, drafter=drafter)
    drafter.save(tmp_path / "table", Numbering(VOCAB, "x"))
    text_alone = LearnedDrafter()
    told = run(Session(engine()), prompt(0, 1), max_new_tokens=NEW).tokens
    text_alone.reset([t for t in prompt(0, 1) if t < VOCAB])
    text_alone.observe(told, 0)
    text_alone.finish()
    assert drafter.pairs == text_alone.pairs > 0


class Listening(OracleDrafter):
    """Notes what it is told."""

    def __init__(self, beyond: bool) -> None:
        super().__init__((), VOCAB)
        self.beyond, self.told = beyond, list[list[int]]()

    def reset(self, prompt: Sequence[int], *info: object) -> None:
        self.told.append(list(prompt))

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        self.told.append(list(context))
        return Draft((PICTURES[0][0],))


@pytest.mark.parametrize("beyond", [True, False])
def test_a_drafter_is_told_them_if_it_asks(beyond: bool) -> None:
    """A row that a drafter proposes is never accepted."""
    drafter = Listening(beyond)
    told = run(Session(engine()), prompt(1), max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft())
    assert told.tokens == alone(prompt(1)) and sum(told.drafted) == 0
    before = prompt(1) if beyond else [t for t in prompt(1) if t < VOCAB]
    assert drafter.told[0] == before and len(drafter.told) > 2
    assert drafter.told[-1] == [*before, *told.tokens[:-2]]  # nothing is proposed for the last pass


def test_drafters_that_read_the_models_positions_ask() -> None:
    assert HeadDrafter.beyond and AssistantDrafter.beyond


def test_the_text_of_an_answer_is_what_it_is_without_them() -> None:
    def detokenize(tokens: Sequence[int]) -> str:
        return "".join(chr(97 + t) if t < 26 else "-" for t in np.array(tokens, dtype=np.uint8))

    told = run(Session(engine()), prompt(0), max_new_tokens=NEW, options=Options(detokenize=detokenize))
    assert told.text == detokenize(told.tokens)


def test_nothing_says_how_likely_a_picture_is() -> None:
    with pytest.raises(DecodeError, match="of a prompt with pictures or sounds can't be had"):
        run(Session(engine()), prompt(0), max_new_tokens=1, options=Options(prompt_logprobs=1))


def test_a_prompt_may_be_a_picture_alone() -> None:
    assert len(run(Session(engine()), PICTURES[0], max_new_tokens=3, drafter=create_drafter("ngram")).tokens) == 3
    assert run(Session(engine()), prompt(0), max_new_tokens=0).tokens == ()
