"""The plain policy: every draft is verified whole."""

from shardmill.decode.drafters.base import Draft
from shardmill.decode.policies.base import PassReport


class AlwaysDraft:
    """A policy that verifies every draft whole."""

    name = "always"

    def start(self, tokens: int) -> None:
        """See `DraftPolicy`."""

    def timed(self, width: int, seconds: float) -> None:
        """See `DraftPolicy`."""

    def limit(self, most: int) -> int:
        """See `DraftPolicy`."""
        return most

    def length(self, draft: Draft) -> int:
        """See `DraftPolicy`."""
        return len(draft.tokens)

    def observe(self, report: PassReport) -> None:
        """See `DraftPolicy`."""
