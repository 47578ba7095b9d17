"""Speculative sampling leaves the model's distribution as it is, and top-p acceptance, being lossy, does not."""

import numpy as np
import pytest
from numpy.typing import NDArray

from shardmill.decode import DecodeError, Options, Sampling, Session, run
from shardmill.decode.drafters import Draft
from shardmill.decode.policies import AlwaysDraft
from shardmill.decode.sampler import Sampler

from .scripted import OracleDrafter, ScriptedEngine

P = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
Q = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
ROW = np.log(P).astype(np.float32)
DRAWS = 4000
CRITICAL = 18.47  # chi-squared, 4 degrees of freedom, p = 0.001


def chi_squared(tokens: list[int], probs: np.ndarray) -> float:
    observed = np.bincount(tokens, minlength=len(probs))
    expected = probs * len(tokens)
    return float(((observed - expected) ** 2 / expected).sum())


def sampler(seed: int, **settings: float) -> Sampler:
    return Sampler(Sampling(temperature=1.0, seed=seed, **settings), [0], 5)  # type: ignore[arg-type]


def test_plain_sampling_has_the_models_distribution() -> None:
    assert chi_squared([sampler(s).next(ROW) for s in range(DRAWS)], P) < CRITICAL


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
    assert Sampler(Sampling(), [0], 3).margin(row) == pytest.approx(0.001, rel=1e-3)
    assert Sampler(Sampling(logit_bias={1: -100.0}), [0], 3).margin(row) == pytest.approx(1.0)


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
