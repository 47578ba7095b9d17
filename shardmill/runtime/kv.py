"""The host's side of the graph contract: which position is in each slot, and the arrays that go into a pass.

models/contract.py has the names and shapes of these arrays, and says what the masks mean. pack.py does the same for
encoders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.models.caches import RING
from shardmill.models.contract import rope_inputs

Floats = NDArray[np.float32]

MASKED = np.float32(-1e4)  # never -inf: the Neural Engine's softmax turns it into NaN (rule N4)
NEVER = np.iinfo(np.int64).max  # the position of a slot that holds nothing
RINGS = ("recent", "ring")  # what a KVLayout records of its rings
FOLDED, SKIPPED = "folded", "skipped"  # what it records beside them of a recurrence


class KVLayout:
    """The positions in all slots, and the arrays of a pass that follow from these positions.

    One layout serves all parts of a model, since all parts see the same tokens. A program takes only the arrays that
    are its inputs.
    """

    def __init__(self, runtime: Mapping[str, Any]) -> None:
        """Make the rotary tables, with a row for each slot.

        Args:
            runtime: settings of the model from model.json: context, rope, window, window_slots, conv_taps, recurrent,
                tower.
        """
        self.slots: int = runtime["context"]
        self.length = self.slots  # the number of slots that the programs have now
        self.window: int | None = runtime["window"]
        self.taps: int = runtime["conv_taps"]
        self.window_slots: int = runtime["window_slots"]
        self.rope: Mapping[str, Mapping[str, Any]] = runtime["rope"]
        # By which axis of a position each frequency turns: time, height or width; empty where these are the same. A
        # table with fewer frequencies has the first ones.
        self.axes = np.asarray(runtime.get("tower", {}).get("axes", ()), np.int64)
        self.tables = {
            name: values
            for table, numbers in self.rope.items()
            for name, values in zip(rope_inputs(table), rope_tables(numbers, self.slots), strict=True)
        }
        self.held = np.full(self.slots, NEVER)  # position that each slot was last written with
        self.recent = np.full(self.window_slots, NEVER)  # position in each slot of the sliding layers' rings
        self.ring = np.full(RING, NEVER)  # position in each slot of the rings of convolutions and recurrences
        sizes = dict(runtime.get("recurrent") or {})
        self.narrow: int | None = sizes.pop("narrow", None)  # a pass of more tokens has several blocks of a recurrence
        self.recurrent: Mapping[str, int] | None = sizes or None
        self.folded = 0  # a recurrence's state holds every position before this one, and no other
        self.skipped = 0  # positions that a recurrence has folded without putting them into its ring

    def reset(self) -> None:
        """Forget every slot. What the states hold is masked until it is overwritten."""
        self.held[:] = NEVER
        self.recent[:] = NEVER
        self.ring[:] = NEVER
        self.folded = self.skipped = 0

    @property
    def is_empty(self) -> bool:
        """Return whether no slot holds anything."""
        return not any((slots != NEVER).any() for slots in (self.held, self.recent, self.ring))

    def resize(self, length: int) -> None:
        """Go on with programs of `length` slots; the content of the other slots is forgotten.

        Rings are the same at every length. They still show which positions were overwritten by forgotten tokens.
        """
        self.held[length:] = NEVER
        self.length = length

    def forget(self, slots: Sequence[int]) -> None:
        """Hide slots until they are written again."""
        self.recent[np.isin(self.recent, self.held[list(slots)])] = NEVER
        self.held[list(slots)] = NEVER

    def rings(self) -> dict[str, NDArray[np.int64]]:
        """Return a copy of the position in each slot of each ring, and up to where a recurrence is folded."""
        return {name: np.array(getattr(self, name)) for name in (*RINGS, FOLDED, SKIPPED)}

    def restore(self, start: int, stop: int, rings: Mapping[str, NDArray[np.int64]] | None = None) -> None:
        """Mark as written the slots that are given their content from outside.

        Args:
            start: the first position, which is also the number of its slot.
            stop: the position after the last.
            rings: what `rings` returned when the rings had their new content; None if they keep their content.
        """
        self.held[start:stop] = np.arange(start, stop)
        if rings is not None:
            self.folded, self.skipped = int(rings[FOLDED]), int(rings[SKIPPED])
            for name in RINGS:
                getattr(self, name)[:] = rings[name]

    def arrays(
        self, slots: Sequence[int], positions: Sequence[int], turned: NDArray[np.int64] | None = None
    ) -> dict[str, Floats]:
        """Return the arrays of a pass by the names of inputs, and mark its slots as written.

        Args:
            slots: of each token.
            positions: of each token; everything but rotary rows goes by them.
            turned: the positions by which tokens are turned, of time, height and width, [T, 3], see `axes`.

        Raises:
            ValueError: if a layer would need a token that its ring no longer holds.
        """
        at, where = np.asarray(positions), np.asarray(slots)
        arrays = self._rotary(at) if turned is None else self._rotary_by_axes(turned)
        if self.window_slots:  # first, since a ring may refuse: then no slot counts as written
            self._check_window(int(at[0]))
        if self.taps:
            arrays |= self._ring_masks(at)
        if self.recurrent:
            arrays |= self._recurrent_masks(at, **self.recurrent)
        self.held[where] = at
        in_slots = self.held[: self.length]
        arrays["attn_mask"] = attention_mask(in_slots, at)
        arrays["kv_write_mask"] = write_mask(self.length, where)
        if self.window_slots:
            ring = at % self.window_slots
            self.recent[ring] = at
            arrays["attn_mask_sliding"] = attention_mask(self.recent, at, self.window)
            arrays["kv_write_mask_sliding"] = write_mask(self.window_slots, ring)
        elif self.window is not None:
            arrays["attn_mask_sliding"] = attention_mask(in_slots, at, self.window)
        return arrays

    def before(self, position: int) -> dict[str, Floats]:
        """Return the arrays of a pass of one token that is written nowhere, and sees the positions before its own."""
        at = np.asarray([position])
        in_slots = self.held[: self.length]
        arrays = self._rotary(at) | {"attn_mask": attention_mask(in_slots, at - 1)}
        if self.window is not None:
            slots = self.recent if self.window_slots else in_slots
            arrays["attn_mask_sliding"] = attention_mask(slots, at - 1, self.window - 1)
        return arrays

    def _rotary(self, at: NDArray[np.int64]) -> dict[str, Floats]:
        """Return rotary rows of these positions, each [T, rope_dim / 2]; a sliding context goes past the tables."""
        if at[-1] < self.slots:
            return {name: table[at] for name, table in self.tables.items()}
        return {
            name: rows
            for table, numbers in self.rope.items()
            for name, rows in zip(rope_inputs(table), rope_rows(numbers, at), strict=True)
        }

    def _rotary_by_axes(self, turned: NDArray[np.int64]) -> dict[str, Floats]:
        """Return rotary rows, each frequency turned by its axis of the positions [T, 3]."""
        rows = {}
        for name, table in self.tables.items():
            frequencies = np.arange(table.shape[1])
            rows[name] = table[turned[:, self.axes[frequencies]], frequencies]
        return rows

    def rewindable(self, position: int) -> bool:
        """Return whether the next pass may start at a position, given what the rings still hold."""
        if self.taps and not all(self.ring[p % RING] == p for p in range(max(position - self.taps + 1, 0), position)):
            return False
        if self.recurrent and not self._foldable(position, **self.recurrent):
            return False
        return not self.window_slots or not len(self._overtaken(position))

    def undoable(self, position: int) -> int | None:
        """Return how many tokens may be fed one by one from a position on, so that a pass may still start there.

        None if no recurrence limits this.
        """
        if not self.recurrent:
            return None
        folded, block = self.folded if position else 0, self.recurrent["block"]
        return folded + block - position or block  # a block that is full is folded by the first token

    def _overtaken(self, position: int) -> NDArray[np.int64]:
        """Return earlier positions that a sliding layer would look at and whose slots later positions took."""
        wanted: NDArray[np.int64] = np.arange(max(position - (self.window or 0) + 1, 0), position)
        in_slots = self.recent[wanted % self.window_slots]
        lost: NDArray[np.int64] = wanted[(in_slots > wanted) & (in_slots != NEVER)]
        return lost

    def _check_window(self, position: int) -> None:
        lost = self._overtaken(position)
        if len(lost):
            ring = f"the sliding layers' ring of {self.window_slots}"
            raise ValueError(f"position {lost[0]} is no longer in {ring}; feed it again")

    def _ring_masks(self, at: NDArray[np.int64]) -> dict[str, Floats]:
        """Return conv_write_mask [1, 1, T, R] and conv_read_mask [1, L - 1, R, T]: slot = position mod R."""
        ring, count = self.ring.copy(), len(at)
        ring[at % RING] = at
        write = np.zeros((1, 1, count, RING), np.float32)
        write[0, 0, np.arange(count), at % RING] = 1
        read = np.zeros((1, self.taps - 1, RING, count), np.float32)
        for back in range(1, self.taps):
            wanted = at - back
            columns = np.flatnonzero(wanted >= 0)  # before the text a convolution reads zeros
            lost = wanted[columns][ring[wanted[columns] % RING] != wanted[columns]]
            if len(lost):
                raise ValueError(f"position {lost[0]} is no longer in the convolutions' ring of {RING}; feed it again")
            read[0, back - 1, wanted[columns] % RING, columns] = 1
        self.ring = ring
        return {"conv_write_mask": write, "conv_read_mask": read}

    def ring_slots(self, positions: Any) -> Any:
        """Return the slot of each position in the ring of a recurrence, or of convolutions."""
        return (np.asarray(positions) - self.skipped) % RING

    def _foldable(self, position: int, block: int, taps: int) -> bool:
        """Return whether a recurrence can go on at a position.

        Nothing after it may be folded, and what is pending before it must be in the ring, with what the convolution
        reads. A text may always begin.
        """
        if not position:
            return True
        wanted = np.arange(max(self.folded - taps + 1, 0), position)
        in_ring = bool((self.ring[self.ring_slots(wanted)] == wanted).all())
        return self.folded <= position <= self.folded + block and in_ring

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        """Return conv_write_mask [1, 1, T, R] and the three masks of a recurrence.

        Pending tokens are folded only when a window has no room for them beside the pass' own tokens. Each fold rounds
        the state, and a session can go back as far as the state is not folded. A pass of more than `narrow` tokens
        folds all its own blocks but the last. It puts into the ring what the next pass needs, in the slots after those
        that it reads.
        """
        first, count, back = int(at[0]), len(at), taps - 1
        wide = self.narrow is not None and count > self.narrow
        if count > block and not wide or (np.diff(at) != 1).any():
            raise ValueError(f"positions {at.tolist()}: a recurrence takes up to {block} that follow one another")
        if not self._foldable(first, block, taps):
            raise ValueError(f"position {first}: the recurrence is folded up to {self.folded}; feed the text again")
        folded = self.folded if first else 0
        stays = first - folded + count <= block and not wide
        begin, until = (folded, 0) if stays else (first, first)  # of the second window; what is folded before the pass
        last = at[-1] - (count - 1) % block if wide else begin  # the beginning of the last block
        read = np.zeros((1, 2 * (block + back), RING, count), np.float32)
        windows = ((folded, until), (begin, first if wide else first + count))
        for number, (start, end) in enumerate(windows):
            wanted = np.arange(max(start - back, 0), min(start + block, end))
            read[0, number * (block + back) + wanted - (start - back), self.ring_slots(wanted), 0] = 1
        written = at[at >= last - back]
        self.skipped += int(written[0]) - first
        ring = self.ring.copy()
        ring[self.ring_slots(written)] = written
        write = np.zeros((1, 1, count, RING), np.float32)
        write[0, 0, written - first, self.ring_slots(written)] = 1
        out = np.zeros((1, 1, count, block), np.float32)
        out[0, 0, np.arange(count), (at - begin) % block] = 1
        keep = np.zeros((1, 1, 1, count), np.float32)
        keep[..., 0] = folded > 0
        self.ring, self.folded = ring, int(last)
        names = ("conv_write_mask", "recurrent_read_mask", "recurrent_out_mask", "recurrent_keep_mask")
        return dict(zip(names, (write, read, out, keep), strict=True))


def token_rows(table: Any, tokens: Sequence[int], layers: int) -> dict[str, Floats]:
    """Return the tokens' rows for each layer by the names of inputs: p_i [1, P, T, 1].

    Args:
        table: the host's table of rows for each token and layer, [vocab * layers, P].
        tokens: the tokens of a pass.
        layers: layers of the model.
    """
    rows = table[np.asarray(tokens)[:, None] * layers + np.arange(layers)]  # [T, layers, P]
    return {f"p_{i}": rows[:, i].T[None, :, :, None] for i in range(layers)}


def rope_rows(rope: Mapping[str, Any], positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return cos and sin of these positions, [T, rope_dim / 2], for positions of any size.

    The angle is computed in float64: at the positions of a long text, float32 loses a step of one position.
    """
    angles = positions[:, None] * np.asarray(rope["inv_freq"], np.float32).astype(np.float64)
    scale = np.float32(rope["scale"])
    return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale


def rope_tables(rope: Mapping[str, Any], positions: int) -> tuple[Floats, Floats]:
    """Return cos and sin for every position, [positions, rope_dim / 2], the attention factor included."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.asarray(rope["inv_freq"], np.float32)
    scale = np.float32(rope["scale"])
    return np.cos(angles) * scale, np.sin(angles) * scale


def attention_mask(in_slots: NDArray[np.int64], positions: NDArray[np.int64], window: int | None = None) -> Floats:
    """Return [1, 1, T, S]: 0 where slot s holds a position <= the token's, within its window, otherwise -1e4."""
    visible = in_slots[None, :] <= positions[:, None]
    if window is not None:
        visible &= in_slots[None, :] > positions[:, None] - window
    return np.where(visible, np.float32(0), MASKED)[None, None]


def write_mask(slots: int, where: NDArray[np.int64]) -> Floats:
    """Return [1, 1, S, T], one-hot: row s, column t = 1 writes token t into slot s."""
    mask = np.zeros((1, 1, slots, len(where)), np.float32)
    mask[0, 0, where, np.arange(len(where))] = 1
    return mask
