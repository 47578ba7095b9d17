"""Where a position's key and value live, and which positions a query still sees.

`AppendOnly` is slot = position and ends at S. `Ring` keeps the first `sinks` positions for ever and
reuses the other slots in turn. Positions are never renumbered (keys are cached after their rotation), so
sliding is masks alone.

What a query may see must depend on its position only, not on how many drafts happened to be written, or
greedy output would change with the drafter. The ring therefore evicts whole blocks, at fixed positions,
early enough that `lookahead` uncommitted tokens never overwrite a visible one, and no pass crosses such a
boundary. Attention sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
"""

from dataclasses import dataclass
from typing import Protocol

from shardmill.decode.errors import DecodeError


class Layout(Protocol):
    """Maps positions to slots."""

    def slot(self, position: int) -> int:
        """Slot that holds `position`."""

    def first_visible(self, position: int) -> int:
        """First position, sinks apart, that a query at `position` sees."""

    def room(self, position: int) -> int | None:
        """How many positions from `position` on have a slot; None: no end."""

    def same_window(self, position: int) -> int | None:
        """How many positions from `position` on see the same first position; None: all."""


@dataclass(frozen=True)
class AppendOnly:
    """Slot = position, until the slots are used up."""

    slots: int

    def slot(self, position: int) -> int:
        """See `Layout`."""
        return position

    def first_visible(self, position: int) -> int:
        """See `Layout`."""
        return 0

    def room(self, position: int) -> int | None:
        """See `Layout`."""
        return max(0, self.slots - position)

    def same_window(self, position: int) -> int | None:
        """See `Layout`."""
        return None


@dataclass(frozen=True)
class Ring:
    """`sinks` slots are kept, the rest form a ring whose oldest `block` positions are given up at a time."""

    slots: int
    sinks: int
    lookahead: int
    block: int

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.block < 1 or self.capacity < self.lookahead + 2 * self.block:
            raise DecodeError(
                f"{self.slots} slots cannot slide with {self.sinks} sinks, blocks of {self.block} and "
                f"passes of {self.lookahead}: use fewer sinks, smaller blocks or context_policy=stop"
            )

    @property
    def capacity(self) -> int:
        """Slots in the ring."""
        return self.slots - self.sinks

    def slot(self, position: int) -> int:
        """See `Layout`."""
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % self.capacity

    def first_visible(self, position: int) -> int:
        """See `Layout`."""
        overwritten = position + self.lookahead - self.capacity  # every position below this may be gone
        return max(self.sinks, -(-overwritten // self.block) * self.block)

    def room(self, position: int) -> int | None:
        """See `Layout`."""
        return None

    def same_window(self, position: int) -> int | None:
        """See `Layout`."""
        first = self.first_visible(position)
        last = first // self.block * self.block - self.lookahead + self.capacity
        return last - position + 1
