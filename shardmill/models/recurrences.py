"""The sizes of recurrences: layers with a state of one size for a text of any length, in the place of attention.

`RECURRENCES` has the kinds by the name of their mixer, which is also the name of their sizes in a `Graph`. Everything
outside a mixer's own module asks by that table, and by the names that all kinds have in common (`Recurrence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Protocol

from shardmill.errors import CheckpointError

MOST_TAPS = 8  # of the short convolution of any kind


class Recurrence(Protocol):
    """What is asked of the sizes of any kind."""

    triangles: ClassVar[tuple[str, ...]]  # the constants of models/part_kinds.py that its blocks read, in order

    @property
    def taps(self) -> int:
        """Return how many positions its short convolution reads."""

    @property
    def pending(self) -> int:
        """Return the channels of the ring: what a position would add, where a column of zeros adds nothing."""

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the state's axes after the first, which is 1."""

    @property
    def widths(self) -> Mapping[str, int]:
        """Return sizes that are a last axis of something kept, by the names that they have in a config."""


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of gated DeltaNet layers (models/delta_net.py)."""

    triangles: ClassVar[tuple[str, ...]] = ("causal", "later", "later_decays", "decay_sums")
    key_heads: int  # each serves value_heads / key_heads neighbouring value heads
    value_heads: int
    key_dim: int  # of a head, for queries too
    value_dim: int
    taps: int  # of the short convolution of query, key and value

    @property
    def mixed(self) -> int:
        """Return the channels of query, key and value together, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def pending(self) -> int:
        """Return the channels of the ring: query, key and value, then a beta and a decay for each value head."""
        return self.mixed + 2 * self.value_heads

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the state's axes: value heads, and a matrix of each."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def widths(self) -> dict[str, int]:
        """Return the widths of keys and values."""
        return {"linear_key_head_dim": self.key_dim, "linear_value_head_dim": self.value_dim}


@dataclass(frozen=True)
class Mamba2:
    """The sizes and options of Mamba-2 layers (models/mamba.py)."""

    triangles: ClassVar[tuple[str, ...]] = ("causal", "later_decays", "decay_sums")
    heads: int
    groups: int  # heads / groups neighbouring heads share B and C
    head_dim: int
    state_dim: int  # of B and C
    taps: int  # of the short convolution of x, B and C
    conv_bias: bool = True
    least_step: float = 0.0  # smaller steps count as this one

    @property
    def width(self) -> int:
        """Return the channels of all heads."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Return the channels of x, B and C together, which the convolution reads."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def pending(self) -> int:
        """Return the channels of the ring: x, B and C, then a step for each head."""
        return self.mixed + self.heads

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the state's axes: heads, and a matrix of each."""
        return self.heads, self.head_dim, self.state_dim

    @property
    def widths(self) -> dict[str, int]:
        """Return the width of B and C."""
        return {"state_dim": self.state_dim}


@dataclass(frozen=True)
class RgLru:
    """The sizes of RG-LRU layers (models/rg_lru.py)."""

    triangles: ClassVar[tuple[str, ...]] = ()
    heads: int  # matrices of each gate
    head_dim: int
    taps: int  # of the short convolution

    @property
    def width(self) -> int:
        """Return the channels of all heads, each with a state of its own."""
        return self.heads * self.head_dim

    @property
    def pending(self) -> int:
        """Return the channels of the ring: x, then a 1 for each token."""
        return self.width + 1

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the state's axes: a number for each channel."""
        return 1, 1, self.width

    @property
    def widths(self) -> dict[str, int]:
        """Return the width of the state."""
        return {"lru_width": self.width}


RECURRENCES: Mapping[str, type] = {"delta": DeltaNet, "mamba": Mamba2, "rg_lru": RgLru}
ALWAYS_WRITTEN = ("delta", "mamba")  # in the files of every build, null in those of a model without such layers
LATER = ("tower", "convolutions")  # fields that files of older builds lack, and that only parts which have them write


def written(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a dataclass as files have them, for `asdict`: without LATER ones and recurrences it lacks.

    So a further kind of recurrence changes the files, and with them the keys, of no model that lacks it.
    """
    optional = {*RECURRENCES, *LATER} - {*ALWAYS_WRITTEN}
    return {name: value for name, value in fields if value is not None or name not in optional}


def checked_mamba(mamba: Mamba2) -> Mamba2:
    """Return the sizes themselves. Raises CheckpointError for sizes that no program has."""
    for name in ("heads", "groups", "head_dim", "state_dim"):
        if (size := getattr(mamba, name)) < 1:
            raise CheckpointError(f"the {name} of the Mamba-2 layers is {size}: it must be 1 or more")
    if mamba.heads % mamba.groups:
        raise CheckpointError(f"{mamba.heads} heads of Mamba-2 are no multiple of {mamba.groups} groups")
    if not 1 < mamba.taps <= MOST_TAPS:
        raise CheckpointError(f"the convolution of Mamba-2 has {mamba.taps} taps: programs have 2 to {MOST_TAPS}")
    if not 0 <= mamba.least_step < inf:
        raise CheckpointError(f"the least step of Mamba-2 is {mamba.least_step}: it must be 0 or more")
    return mamba
