"""Layouts of an engine's slots: which slot a position has, and which positions a sliding context evicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafted_decoding.engine import DecodeError

ContextPolicy = Literal["stop", "slide"]  # what happens when the slots are used up

SINKS = 4  # positions that a sliding context never evicts

_LONGEST_BLOCK = 64  # the most positions that it evicts at a time


@dataclass(frozen=True)
class AppendOnly:
    """A layout in which a position's slot equals the position, until the slots are used up."""

    slots: int

    def slot(self, position: int) -> int:
        """Return the slot of `position`."""
        return position

    def first_visible(self, position: int) -> int:
        """Return the first position, other than the sinks, that a query at `position` sees."""
        return 0

    def room(self, position: int) -> int:
        """Return how many positions from `position` on have a slot; None if unlimited, as in a ring."""
        return max(0, self.slots - position)

    def writable(self, position: int) -> int:
        """Return how many positions from `position` on can be written without overwriting one that `position` sees."""
        return self.room(position)

    def same_window(self, position: int) -> int | None:
        """Return how many positions from `position` on see the same first position; None if all do."""
        return None


@dataclass(frozen=True)
class Ring:
    """A layout that keeps `sinks` slots; the rest form a ring that evicts its oldest `block` positions at a time."""

    slots: int
    sinks: int
    lookahead: int
    block: int

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.block < 1 or self.capacity < self.lookahead + 2 * self.block:
            raise DecodeError(
                f"a context of {self.slots} tokens is too small to slide with {self.sinks} sinks, blocks of "
                f"{self.block} and passes of {self.lookahead}: use context policy stop, or build with a larger context"
            )

    @property
    def capacity(self) -> int:
        """Return the number of slots in the ring."""
        return self.slots - self.sinks

    def slot(self, position: int) -> int:
        """See `AppendOnly`."""
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % self.capacity

    def first_visible(self, position: int) -> int:
        """See `AppendOnly`."""
        overwritten = position + self.lookahead - self.capacity  # every position below this may be overwritten
        return max(self.sinks, -(-overwritten // self.block) * self.block)

    def room(self, position: int) -> int | None:
        """See `AppendOnly`."""
        return None

    def writable(self, position: int) -> int:
        """See `AppendOnly`. The result is at least `lookahead`, and larger right after the window has slid."""
        return self.first_visible(position) + self.capacity - position

    def same_window(self, position: int) -> int | None:
        """See `AppendOnly`."""
        first = self.first_visible(position)
        last = first // self.block * self.block - self.lookahead + self.capacity
        return last - position + 1


def choose_layout(
    policy: ContextPolicy, slots: int, lookahead: int, *, sinks: int = SINKS, block: int | None = None
) -> AppendOnly | Ring:
    """Return the layout of a policy.

    Args:
        policy: stop when the slots are used up, or slide the window.
        slots: the engine's slots.
        lookahead: tokens of the widest decode pass; how a prompt is fed does not change what a position sees.
        sinks: positions that a sliding window never evicts.
        block: positions that it evicts at a time; by default 1/8 of the slots, at most 64.

    Raises:
        DecodeError: no policy has that name, or the context is too small to slide.
    """
    if policy == "stop":
        return AppendOnly(slots)
    if policy == "slide":
        return Ring(slots, sinks, lookahead, block or max(1, min(_LONGEST_BLOCK, slots // 8)))
    raise DecodeError(f"the context policy is {policy!r}: it must be stop or slide")
