"""A fake engine that answers from exactly what a token may see, so that any slip in slots or positions shows.

It keeps every slot's position and token, refuses calls that break the engine's contract, and derives a
row's logits from a hash of the visible context.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np
from drafted_decoding.drafters import PLAIN, Draft, RequestInfo
from drafted_decoding.engine import PlainEngine
from numpy.typing import NDArray

HIDDEN = 1 << 60


def chaotic(vocab: int) -> Callable[[tuple[tuple[int, int], ...]], int]:
    """Next token = hash of everything visible: one wrong or missing entry changes all that follows."""
    return lambda visible: random.Random(repr(visible)).randrange(vocab)


def repetitive(vocab: int, period: int = 7, noise: int = 9) -> Callable[[tuple[tuple[int, int], ...]], int]:
    """Mostly a repeating pattern, now and then a token that only the whole visible context determines."""

    def next_token(visible: tuple[tuple[int, int], ...]) -> int:
        rng = random.Random(repr(visible))
        return rng.randrange(vocab) if rng.randrange(noise) == 0 else (visible[-1][0] % period) * 3 % vocab

    return next_token


class ScriptedEngine(PlainEngine):
    """Obeys the visibility rule of `Engine` and checks that its caller obeys the rest."""

    def __init__(
        self,
        *,
        slots: int = 256,
        widths: Sequence[int] = (1, 4),
        vocab: int = 50,
        next_token: Callable[[tuple[tuple[int, int], ...]], int] | None = None,
    ) -> None:
        self.slots, self.widths, self.vocab = slots, tuple(widths), vocab
        self._next_token = next_token or chaotic(vocab)
        self.calls: list[tuple[int, ...]] = []
        self.reset()

    def reset(self) -> None:
        self._position = [HIDDEN] * self.slots
        self._token = [-1] * self.slots

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._position[slot] = HIDDEN

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        assert len(tokens) == len(slots) == len(positions)
        assert len(tokens) in self.widths, f"width {len(tokens)} is not configured"
        assert all(0 <= s < self.slots for s in slots), "a slot past S"
        assert len(set(slots)) == len(slots), "one slot written twice in a call"
        assert list(positions) == list(range(positions[0], positions[0] + len(positions)))
        self.calls.append(tuple(positions))
        for token, slot, position in zip(tokens, slots, positions, strict=True):
            self._token[slot], self._position[slot] = token, position
        return np.stack([self._row(p) for p in positions])  # [T, V]

    def _row(self, position: int) -> NDArray[np.float32]:
        visible = tuple(sorted((p, t) for p, t in zip(self._position, self._token, strict=True) if p <= position))
        assert len({p for p, _ in visible}) == len(visible), "two visible slots hold the same position"
        logits = np.random.default_rng(abs(hash(visible))).random(self.vocab, dtype=np.float32)
        logits[self._next_token(visible)] += 2.0
        return logits


class OracleDrafter:
    """Knows what the engine will say and spoils every draft at a position that varies from pass to pass."""

    name = "oracle"

    def __init__(self, tokens: Sequence[int], vocab: int, *, spoil: bool = True) -> None:
        self._truth, self._vocab, self._spoil, self._passes = tuple(tokens), vocab, spoil, 0
        self._length = 0

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        self._length = len(prompt)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        done = len(context) - self._length
        draft = list(self._truth[done : done + limit])
        self._passes += 1
        wrong = self._passes % 5
        if self._spoil and wrong < len(draft):
            draft[wrong] = (draft[wrong] + 1) % self._vocab
        return Draft(tuple(draft))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        pass

    def finish(self) -> None:
        pass
