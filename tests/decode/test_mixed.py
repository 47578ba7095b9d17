"""The mixed drafter takes the best promise, and learns what promises are worth."""

from shardmill.decode.drafters import Draft
from shardmill.decode.drafters.mixed import MixedDrafter

from .scripted import OracleDrafter


class Fixed(OracleDrafter):
    """Always proposes the same and says how sure it is."""

    def __init__(self, token: int, confidence: float) -> None:
        super().__init__((), 50)
        self.draft = Draft((token,), (confidence,))
        self.heard: list[int] = []

    def propose(self, context, limit: int) -> Draft:  # type: ignore[no-untyped-def]
        return self.draft

    def observe(self, emitted, accepted: int) -> None:  # type: ignore[no-untyped-def]
        self.heard.append(accepted)


def test_mixed_takes_the_better_promise_and_learns_who_boasts() -> None:
    boaster, modest = Fixed(1, 0.8), Fixed(2, 0.4)
    mixed = MixedDrafter([boaster, modest])
    mixed.reset([0])
    assert mixed.propose([0], 1) == boaster.draft
    for _ in range(20):
        mixed.propose([0], 1)
        mixed.observe([2], 0)
    assert mixed.propose([0], 1) == modest.draft


def test_mixed_tells_each_member_how_its_own_proposal_fared() -> None:
    right, wrong = Fixed(2, 0.4), Fixed(1, 0.5)
    mixed = MixedDrafter([right, wrong])
    mixed.propose([0], 1)
    mixed.observe([2, 5], 0)
    assert (right.heard, wrong.heard) == ([0], [0])  # nothing was accepted: the other's draft was verified
    mixed.propose([0], 1)
    mixed.observe([2, 5], 1)
    assert (right.heard, wrong.heard) == ([0, 1], [0, 0])
