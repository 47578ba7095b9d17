"""Time that only engines and drafters advance, so that what a policy gains or loses can be told to the last pass."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from drafted_decoding.drafters import PLAIN, Draft, RequestInfo
from numpy.typing import NDArray

from .scripted import ScriptedEngine


class Clock:
    """What `time.perf_counter` gives."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock in place of the machine's."""
    made = Clock()
    monkeypatch.setattr("time.perf_counter", made)
    return made


class TimedEngine(ScriptedEngine):
    """A scripted engine whose calls take time; `slower`, by the number of the call, how many times as much."""

    def __init__(
        self,
        clock: Clock,
        costs: Mapping[int, float],
        next_token: Callable[[tuple[tuple[int, int], ...]], int] | None = None,
        slower: Callable[[int, int], float] = lambda call, width: 1.0,
    ) -> None:
        super().__init__(slots=512, widths=sorted(costs), next_token=next_token)
        self._clock, self._costs, self._slower = clock, costs, slower

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        width = len(tokens)
        self._clock.now += self._costs[width] * self._slower(len(self.calls), width)
        return super().forward(tokens, slots, positions)


class Fortune:
    """Knows what the engine will say: the proposals that `right` names are right, all others wrong from their first
    token on; and is always all but certain of itself.
    """

    name = "fortune"

    def __init__(
        self,
        clock: Clock,
        truth: Sequence[int],
        right: Callable[[int], bool],
        *,
        seconds: float = 0.0,
        first_seconds: float = 0.0,
        confidence: float = 0.95,
    ) -> None:
        self._clock, self._truth, self._right, self._seconds = clock, list(truth), right, seconds
        self._first, self._sure = first_seconds, confidence
        self.asked = 0

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        self._prompt = len(prompt)
        self._new = True

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        self._clock.now += self._seconds + (self._first if self._new else 0.0)
        self._new = False
        done = len(context) - self._prompt
        tokens = self._truth[done : done + limit]
        if not self._right(self.asked):
            tokens = [(token + 1) % 50 for token in tokens]
        self.asked += 1
        return Draft(tuple(tokens), (self._sure,) * len(tokens))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        pass

    def finish(self) -> None:
        pass
