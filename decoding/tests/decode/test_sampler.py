"""Speculative sampling leaves the model's distribution as it is, and top-p acceptance, being lossy, does not."""

import math
from typing import Any

import drafted_decoding.sampler
import limits
import numpy as np
import pytest
from drafted_decoding import DecodeError, Options, Sampling, Session, run
from drafted_decoding.drafters import Draft
from drafted_decoding.policies import AlwaysDraft
from drafted_decoding.sampler import Sampler, probabilities
from numpy.typing import NDArray

from .scripted import OracleDrafter, ScriptedEngine

P = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
Q = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
ROW = np.log(P).astype(np.float32)
DRAWS = 4000
CRITICAL = 18.47  # chi-squared, 4 degrees of freedom, p = 0.001


def chi_squared(tokens: list[int], probs: np.ndarray) -> float:
    return chi_squared_of(np.bincount(tokens, minlength=len(probs)), probs)


def chi_squared_of(observed: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


def sampler(seed: int, **settings: float) -> Sampler:
    return Sampler(Sampling(temperature=1.0, seed=seed, **settings), [0], 5)  # type: ignore[arg-type]


def test_plain_sampling_has_the_models_distribution() -> None:
    assert chi_squared([sampler(s).next(ROW) for s in range(DRAWS)], P) < CRITICAL


def test_the_tokens_of_one_seed_have_the_distribution_that_filters_leave() -> None:
    """Numbers at different places of the stream are independent, and so are numbers of different indices."""
    row = np.random.default_rng(2).normal(size=64).astype(np.float32)
    sampling = Sampling(temperature=0.9, top_p=0.8, seed=5)
    probs = probabilities(row.astype(np.float64), sampling)
    long = Sampler(sampling, [0], 64)
    drawn = np.bincount([long.next(row) for _ in range(6000)], minlength=64)
    kept = probs > 0
    assert kept.sum() == 28
    assert not drawn[~kept].any()
    assert chi_squared_of(drawn[kept], probs[kept]) < 55.5  # 27 degrees of freedom, p = 0.001


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7}, {"top_k": 9}, {"min_p": 0.1}])
def test_a_token_waits_by_its_own_word_of_the_stream(settings: dict[str, Any]) -> None:
    """The 53 leading bits of word v of the Philox stream are the number of token v (docs/model-json.md)."""
    rng = np.random.default_rng(1)
    seed = 2**63 + 5
    sampling = Sampling(temperature=0.8, seed=seed, **settings)
    sampler = Sampler(sampling, [0], 99)
    for index in range(60):
        row = rng.normal(size=99).astype(np.float32)
        words = np.random.Philox(key=seed, counter=[0, 0, 2, index]).random_raw(99)
        speeds = [
            p / -math.log1p(-(int(word) >> 11) / 2**53)
            for p, word in zip(probabilities(row.astype(np.float64), sampling), words, strict=True)
        ]
        second, first = sorted(0.8 * math.log(speed) for speed in speeds if speed > 0)[-2:]
        assert sampler.margin(row) == pytest.approx(first - second)
        assert sampler.next(row) == int(np.argmax(speeds))


def test_an_unlikely_token_whose_number_is_0_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is 0 once in 2**53 draws. A token with this number waits too, so that its probability counts."""

    class Zero:
        def random(self, out: NDArray[np.float64]) -> None:
            out[:] = [0.0, 0.5, 0.5]

    monkeypatch.setattr(drafted_decoding.sampler, "_generator", lambda *_: Zero())
    for logit, token in ((-50.0, 1), (-20.0, 0)):  # by 2**54 about 38 nats
        row = np.array([logit, 0.5, 0.0], dtype=np.float32)
        assert Sampler(Sampling(temperature=1.0), [0], 3).next(row) == token


@pytest.mark.parametrize("drafted", [0, 2, 4])
def test_a_certain_draft_keeps_the_distribution(drafted: int) -> None:
    tokens = [sampler(s).check(ROW, drafted, None) for s in range(DRAWS)]
    assert chi_squared(tokens, P) < CRITICAL
    assert np.mean([t == drafted for t in tokens]) == pytest.approx(P[drafted], abs=0.03)


def test_a_drawn_draft_keeps_the_distribution_and_is_accepted_as_often_as_can_be() -> None:
    drafts = np.random.default_rng(1).choice(5, size=DRAWS, p=Q)
    tokens = [sampler(s).check(ROW, int(d), Q) for s, d in enumerate(drafts)]
    assert chi_squared(tokens, P) < CRITICAL
    kept = np.mean([t == d for t, d in zip(tokens, drafts, strict=True)])
    assert kept == pytest.approx(np.minimum(P, Q).sum(), abs=0.03)


def test_the_chi_squared_test_can_fail() -> None:
    """Taking drawn drafts as if they were the model's is seen at once."""
    drafts = np.random.default_rng(1).choice(5, size=DRAWS, p=Q)
    assert chi_squared([int(d) for d in drafts], P) > 10 * CRITICAL


class MarkovEngine(ScriptedEngine):
    """Five tokens whose distribution depends on the last one alone."""

    table = np.random.default_rng(5).dirichlet(np.ones(5), size=5)

    def _row(self, position: int) -> np.ndarray:
        last = self._token[self._position.index(position)]
        return np.log(self.table[last]).astype(np.float32)


class RandomDrafter(OracleDrafter):
    """Draws drafts from a distribution that is not the model's."""

    def __init__(self, seed: int) -> None:
        super().__init__((), 5)
        self._rng = np.random.default_rng(seed)

    def propose(self, context, limit: int) -> Draft:  # type: ignore[no-untyped-def]
        drafts = self._rng.choice(5, size=limit, p=Q)
        return Draft(tuple(drafts.tolist()), (0.5,) * limit, np.tile(Q, (limit, 1)))


@pytest.mark.parametrize("random_drafts", [False, True])
def test_whole_texts_keep_their_distribution(random_drafts: bool) -> None:
    """Pairs of neighbouring tokens, over many texts, occur as the model's transitions say."""
    pairs = np.zeros((5, 5))
    session = Session(MarkovEngine(slots=64, vocab=5))
    for seed in range(150):
        drafter = RandomDrafter(seed) if random_drafts else OracleDrafter([0, 1, 2, 3, 4] * 8, 5, spoil=False)
        options = Options(sampling=Sampling(temperature=1.0, seed=seed))
        tokens = run(session, [0], max_new_tokens=32, drafter=drafter, policy=AlwaysDraft(), options=options).tokens
        np.add.at(pairs, ((0, *tokens[:-1]), tokens), 1)
    expected = MarkovEngine.table * pairs.sum(axis=1, keepdims=True)
    assert ((pairs - expected) ** 2 / expected).sum() < 45.3  # 20 degrees of freedom, p = 0.001


class SameEngine(ScriptedEngine):
    """Five tokens with the distribution P, whatever came before."""

    def _row(self, position: int) -> np.ndarray:
        return ROW


@pytest.mark.parametrize("random_drafts", [False, True])
def test_penalties_are_exact_though_tokens_are_drafted(random_drafts: bool) -> None:
    """Each draft is accepted or redrawn by the distribution that the tokens before it leave."""
    presence, frequency, texts = 1.0, 0.5, 1500
    counted = np.zeros((5, 5, 5))
    session = Session(SameEngine(slots=16, vocab=5))
    for seed in range(texts):
        drafter = RandomDrafter(seed) if random_drafts else OracleDrafter([0, 0, 0, 1], 5, spoil=False)
        sampling = Sampling(temperature=1.0, seed=seed, presence_penalty=presence, frequency_penalty=frequency)
        tokens = run(
            session, [0], max_new_tokens=3, drafter=drafter, policy=AlwaysDraft(), options=Options(sampling)
        ).tokens
        counted[tokens] += 1
    expected = np.ones((5, 5, 5)) * texts
    for tokens in np.ndindex(5, 5, 5):
        for place, token in enumerate(tokens):
            counts = np.bincount(tokens[:place], minlength=5)
            weights = P * np.exp(-counts * frequency - (counts > 0) * presence)
            expected[tokens] *= weights[token] / weights.sum()
    pairs, wanted = counted.sum(axis=0), expected.sum(axis=0)  # of the second and the third token
    assert ((pairs - wanted) ** 2 / wanted).sum() < 51.2  # 24 degrees of freedom, p = 0.001


def test_penalties_count_only_what_was_generated() -> None:
    row = np.array([1.0, 0.9, 0.8], dtype=np.float32)
    present = Sampler(Sampling(presence_penalty=0.15), [0, 0], 3)
    assert [present.next(row) for _ in range(4)] == [0, 1, 0, 0]
    frequent = Sampler(Sampling(frequency_penalty=0.15), [0, 0], 3)
    assert [frequent.next(row) for _ in range(4)] == [0, 1, 0, 2]


def test_the_same_seed_gives_the_same_tokens_whatever_is_drafted() -> None:
    def decode(drafter: OracleDrafter | None, seed: int) -> tuple[int, ...]:
        penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2}
        options = Options(sampling=Sampling(temperature=0.8, top_p=0.9, seed=seed, **penalties))  # type: ignore[arg-type]
        session = Session(ScriptedEngine())
        return run(session, [1, 2], max_new_tokens=40, drafter=drafter, policy=AlwaysDraft(), options=options).tokens

    plain = decode(None, 7)
    assert decode(OracleDrafter(plain, 50), 7) == plain
    assert decode(OracleDrafter(plain, 50, spoil=False), 7) == plain
    assert decode(None, 8) != plain


def test_the_last_bits_of_logits_hardly_ever_change_a_draw() -> None:
    """On a flat distribution over many tokens, where cumulative sums would have an edge everywhere."""
    rng = np.random.default_rng(3)
    changed = 0
    for seed in range(400):
        row = rng.normal(size=2000).astype(np.float32)
        noisy = row + rng.normal(size=2000, scale=3e-5).astype(np.float32)
        first, second = (Sampler(Sampling(temperature=1.0, seed=seed), [0], 2000) for _ in range(2))
        changed += first.next(row) != second.next(noisy)
    assert changed <= 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_margin_is_what_a_logit_may_change(temperature: float) -> None:
    """Raising the runner-up by a little less than the margin changes nothing, by a little more the token."""
    rng = np.random.default_rng(4)
    for seed in range(20):
        row = rng.normal(size=30).astype(np.float32)

        def token(changed: np.ndarray) -> int:
            return Sampler(Sampling(temperature=temperature, seed=seed), [0], 30).next(changed)  # noqa: B023

        margin = Sampler(Sampling(temperature=temperature, seed=seed), [0], 30).margin(row)
        first = token(row)
        for share, same in ((0.99, True), (1.01, False)):
            raised = [token(row + share * margin * (np.arange(30) == i)) for i in range(30) if i != first]
            assert all(t == first for t in raised) == same


def test_the_margin_is_that_of_allowed_tokens() -> None:
    """A biased one here: the runner-up is far behind once the closest token is out of the way."""
    row = np.array([1.0, 0.999, 0.0], dtype=np.float32)
    limits.numbers_agree("the margin", Sampler(Sampling(), [0], 3).margin(row), 0.001, limits.roundings("fp32"), size=1)
    assert Sampler(Sampling(logit_bias={1: -100.0}), [0], 3).margin(row) == pytest.approx(1.0)
    assert Sampler(Sampling(temperature=1.0, top_k=1), [0], 3).margin(row) == np.inf


def test_top_p_acceptance_is_lossy_and_off_by_default() -> None:
    greedy = Sampler(Sampling(), [0], 5)
    assert greedy.check(ROW, 1, None) == 0
    lossy = Sampler(Sampling(accept_top_p=0.6), [0], 5)
    assert lossy.check(ROW, 1, None) == 1  # in the nucleus, though not the likeliest
    assert lossy.check(ROW, 2, None) == 0


def test_top_p_acceptance_never_takes_what_cannot_be() -> None:
    """Sums of probabilities fall short of 1 in their last bits, and the impossible would slip in behind."""

    class Without3:
        finished = False

        def allowed(self) -> NDArray[np.bool_]:
            return np.arange(50) != 3

        def advance(self, token: int) -> None:
            pass

    rng = np.random.default_rng(0)
    for _ in range(50):
        sampler = Sampler(Sampling(accept_top_p=1.0), [0], 50, Without3())  # type: ignore[arg-type]
        assert sampler.check(rng.random(50).astype(np.float32), 3, None) != 3


def test_the_penalty_counts_prompt_and_output() -> None:
    row = np.array([1.0, 0.9, 0.8], dtype=np.float32)
    penalised = Sampler(Sampling(repetition_penalty=2.0), [0], 3)
    assert [penalised.next(row) for _ in range(3)] == [1, 2, 0]


def test_a_bias_on_no_token_is_named() -> None:
    with pytest.raises(DecodeError, match="token 9"):
        Sampler(Sampling(logit_bias={9: 1.0}), [0], 5)
