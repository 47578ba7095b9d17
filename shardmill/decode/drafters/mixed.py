"""Several drafters at once; the proposal that promises the most accepted tokens is taken.

What a drafter promises is corrected by what its promises were worth so far, so one that boasts is soon
ignored.
"""

from collections.abc import Sequence

from shardmill.decode.drafters.base import EMPTY, PLAIN, Draft, Drafter, RequestInfo
from shardmill.decode.verify import agreement

_SURE = 0.6  # expected share of right tokens at which no other member is asked
_FADE = 0.99  # per pass, of what is known of a member's promises
_USUAL = 8.0  # tokens that "its promises are right" is worth


class MixedDrafter:
    """The best-scored proposal of its members; of equals the first."""

    name = "mixed"

    def __init__(self, members: Sequence[Drafter]) -> None:
        self._members = tuple(members)
        self._promised = [0.0] * len(members)  # tokens, by member; older ones fade
        self._right = [0.0] * len(members)
        self._drafts: tuple[Draft, ...] = ()

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""
        self._drafts = ()
        for member in self._members:
            member.reset(prompt, info)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`. Once a proposal is all but sure, the members after it are not asked."""
        best, promise = EMPTY, 0.0
        drafts: list[Draft] = []
        for i, member in enumerate(self._members):
            draft = member.propose(context, limit)
            drafts.append(draft)
            worth = (self._right[i] + _USUAL) / (self._promised[i] + _USUAL)
            expected = worth * promised(draft.confidence)
            if expected > promise:
                best, promise = draft, expected
            if promise >= _SURE * limit:
                break
        self._drafts = tuple(drafts)
        return best

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Judges every proposal by what was emitted, chosen or not."""
        for i, member in enumerate(self._members):
            right = 0
            if i < len(self._drafts) and (draft := self._drafts[i]).tokens:
                right = agreement(draft.tokens, emitted)
                self._right[i] = self._right[i] * _FADE + right
                self._promised[i] = self._promised[i] * _FADE + promised(draft.confidence[: len(emitted)])
            member.observe(emitted, min(accepted, right))
        self._drafts = ()

    def finish(self) -> None:
        """See `Drafter`."""
        for member in self._members:
            member.finish()


def promised(confidence: Sequence[float]) -> float:
    """Tokens of a draft that are right, as its drafter expects."""
    total, alive = 0.0, 1.0
    for sure in confidence:
        alive *= sure
        total += alive
    return total
