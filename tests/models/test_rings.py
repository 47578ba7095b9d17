"""Rings of the host: what sliding layers and convolutions see through them is what they would see of all positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.hosts import host
from shardmill.models.caches import RING
from shardmill.models.contract import most_tokens, window_slots
from shardmill.runtime.kv import Floats

# The sliding layers' ring.


class Cache:
    """A cache of the tokens themselves, written by the host's masks."""

    def __init__(self, slots: int, write: str) -> None:
        self.tokens, self.write = np.zeros(slots), write

    def sees(self, arrays: Mapping[str, Floats], tokens: Sequence[int]) -> list[list[int]]:
        """Writes tokens; what each of them sees, sorted."""
        written = arrays[self.write][0, 0]  # [slots, T]
        self.tokens = self.tokens * (1 - written.sum(axis=1)) + written @ np.asarray(tokens)
        return [sorted(self.tokens[row == 0]) for row in arrays["attn_mask_sliding"][0, 0]]


@pytest.mark.parametrize("window", [1, 2, 5, 28, 29, 30, 60])
@pytest.mark.parametrize("seed", range(3))
def test_a_ring_shows_a_sliding_layer_what_all_slots_would(window: int, seed: int) -> None:
    """With drafts that are rejected. At a window of 29 the ring has no slot to spare."""
    rng, slots, start = np.random.default_rng(seed), 200, 0
    ring = window_slots(window, 4, slots)
    hosts = host(slots, window), host(slots, window, ring=ring)
    caches = Cache(slots, "kv_write_mask"), Cache(ring, "kv_write_mask_sliding")
    while start < 190:
        at = list(range(start, start + int(rng.integers(1, 5))))
        tokens = rng.integers(1, 10**6, len(at)).tolist()
        whole, few = (c.sees(h.arrays(at, at), tokens) for c, h in zip(caches, hosts, strict=True))
        assert few == whole and len(few[-1]) == min(window, at[-1] + 1)
        start += int(rng.integers(1, len(at) + 1))
        assert all(h.rewindable(start) for h in hosts)


def test_what_a_ring_lost_is_not_made_up() -> None:
    """Too far back, and so the text has to be fed again; forgotten slots are lost on purpose."""
    h = host(200, window=20, ring=32)
    for start in range(0, 40, 4):
        at = list(range(start, start + 4))
        h.arrays(at, at)
    assert h.rewindable(27) and not h.rewindable(26) and h.rewindable(0)
    with pytest.raises(ValueError, match="position 7 is no longer in the sliding layers' ring of 32; feed it again"):
        h.arrays([26], [26])
    assert h.recent.tolist() == [*range(32, 40), *range(8, 32)]  # refused, so nothing is marked
    h.forget([38, 39])
    assert (h.arrays([40], [40])["attn_mask_sliding"] == 0).sum() == 18
    h.reset()
    assert h.rewindable(0) and (h.arrays([0], [0])["attn_mask_sliding"] == 0).sum() == 1


# The convolutions' ring.


class Ring:
    """A ring of the inputs themselves, written and read by the host's masks."""

    def __init__(self, taps: int) -> None:
        self.host, self.taps = host(slots=512, taps=taps), taps
        self.kept = np.full(RING, -1.0)

    def read(self, positions: Sequence[int], tokens: Sequence[float]) -> list[list[float]]:
        """For each token what it reads 1, 2, ... positions back; each input is its token's number plus 1."""
        found = self.host.arrays(positions, positions)
        write, read = found["conv_write_mask"][0, 0], found["conv_read_mask"][0]  # [T, R], [L - 1, R, T]
        assert set(np.unique(write)) <= {0, 1} and (write.sum(1) == 1).all() and write.sum(0).max() == 1
        self.kept = self.kept * (1 - write.sum(0)) + (np.asarray(tokens) + 1) @ write
        return [[float(self.kept @ read[back, :, t]) for back in range(self.taps - 1)] for t in range(len(positions))]


@settings(max_examples=50)
@given(st.integers(2, 4), st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=30))
def test_a_convolution_reads_the_accepted_tokens_before_its_own(taps: int, passes: list[tuple[int, int]]) -> None:
    """After any passes with any of their tokens rejected, for longer than the ring is."""
    ring, text = Ring(taps), list[float]()
    number = 0.0
    for width, accepted in passes:
        first, fed = len(text), [number + i for i in range(width)]
        number += width
        assert ring.host.rewindable(first)
        after = text + fed
        expected = [
            [after[p - back] + 1 if p >= back else 0 for back in range(1, taps)] for p in range(first, len(after))
        ]
        assert ring.read(range(first, len(after)), fed) == expected
        text += fed[: min(accepted, width)]


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_the_widest_pass_is_the_one_after_which_no_token_is_missing(taps: int) -> None:
    """Wherever it begins, and with all but one of its tokens taken back; one token more is refused."""
    most, ring = most_tokens(taps), Ring(taps)
    for first in range(40):
        after = list(range(first, first + most))
        expected = [[p - back + 1 if p >= back else 0 for back in range(1, taps)] for p in after]
        assert ring.read(after, after) == expected
    with pytest.raises(ValueError, match="is no longer in the convolutions' ring"):
        ring.read(range(40, 41 + most), range(40, 41 + most))


@given(st.integers(2, 4), st.integers(1, 120), st.integers(0, 140))
@settings(max_examples=100)
def test_rewindable_says_whether_the_ring_still_holds_what_is_needed(taps: int, fed: int, position: int) -> None:
    h = host(slots=512, taps=taps)
    for p in range(fed):
        h.arrays([p], [p])
    oldest = max(position - taps + 1, 0)  # that it reads; position 0 reads none
    sound = position == 0 or (position <= fed and oldest >= fed - RING)
    assert h.rewindable(position) == sound
    if sound:
        h.arrays([position], [position])
    else:
        with pytest.raises(ValueError, match=rf"is no longer in the convolutions' ring of {RING}"):
            h.arrays([position], [position])


def test_a_refused_pass_leaves_no_mark() -> None:
    """Nothing of it was written, so nothing of it may be taken for written."""
    h = host(slots=512, taps=3)
    h.arrays(range(20), range(20))
    before = h.held.copy(), h.ring.copy()
    with pytest.raises(ValueError, match="position 99 is no longer"):
        h.arrays([100], [100])
    assert (h.held == before[0]).all() and (h.ring == before[1]).all()


def test_reset_forgets_the_ring() -> None:
    h = host(slots=512, taps=3)
    h.arrays(range(8), range(8))
    assert h.rewindable(8)
    h.reset()
    assert not h.rewindable(8) and h.rewindable(0)


def test_without_convolutions_every_position_is_rewindable() -> None:
    h = host()
    h.arrays([0], [0])
    assert h.rewindable(40)
    assert not any(name.startswith("conv") for name in h.arrays([1], [1]))


def test_a_ring_remembers_what_was_overwritten_when_the_slots_become_fewer() -> None:
    """Positions that are forgotten have taken the place of others in the ring all the same."""
    h = host(200, window=20, ring=32)
    for start in range(0, 60, 4):
        h.arrays(range(start, start + 4), range(start, start + 4))
    lost = [p for p in range(61) if not h.rewindable(p)]
    h.resize(48)
    assert 46 in lost and [p for p in range(61) if not h.rewindable(p)] == lost
    assert h.arrays([0], [0])["attn_mask"].shape == (1, 1, 1, 48)
