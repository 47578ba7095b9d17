"""The drafter that never drafts: plain decoding."""

from collections.abc import Sequence

from shardmill.decode.drafters.base import EMPTY, PLAIN, Draft, RequestInfo


class NoDrafter:
    """A drafter without proposals."""

    name = "none"

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """See `Drafter`."""

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """See `Drafter`."""
        return EMPTY

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """See `Drafter`."""

    def finish(self) -> None:
        """See `Drafter`."""
