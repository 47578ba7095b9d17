"""Several drafters at once; the proposal that promises the most accepted tokens is taken.

What a drafter promises is corrected by what its promises were worth so far, so one that boasts is soon
ignored.
"""

from collections.abc import Sequence

from shardmill.decode.accept import agreement
from shardmill.decode.calibrate import Calibration
from shardmill.decode.drafters.base import EMPTY, PLAIN, Draft, Drafter, RequestInfo

_SURE = 0.6  # expected share of right tokens at which no other member is asked


class MixedDrafter:
    """The best-scored proposal of its members; of equals the first."""

    name = "mixed"

    def __init__(self, members: Sequence[Drafter]) -> None:
        self._members = tuple(members)
        self._calibrations = tuple(Calibration() for _ in self._members)
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
        for member, calibration in zip(self._members, self._calibrations, strict=True):
            drafts.append(member.propose(context, limit))
            expected = calibration.expected(drafts[-1].confidence)
            if expected and expected[-1] > promise:
                best, promise = drafts[-1], expected[-1]
            if promise >= _SURE * limit:
                break
        self._drafts = tuple(drafts)
        return best

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Judges every proposal by what was emitted, chosen or not."""
        for i, member in enumerate(self._members):
            draft = self._drafts[i] if i < len(self._drafts) else EMPTY
            right = agreement(draft.tokens, emitted)
            self._calibrations[i].observe(draft.confidence[: len(emitted)], right)
            member.observe(emitted, min(accepted, right))
        self._drafts = ()

    def finish(self) -> None:
        """See `Drafter`."""
        for member in self._members:
            member.finish()
