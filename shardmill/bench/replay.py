"""How many drafts would be accepted if a known output came again and every pass drafted all it may: an upper bound.

Live decoding accepts fewer: the width control drafts less where that would lose time, and on an engine whose rows
differ with the width of a pass the text itself may change. A fresh drafter replays; one that is resident may have
learned which of its proposals to trust. So the two are never mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmill.decode import Drafter
from shardmill.decode.verify import agreement


@dataclass(frozen=True)
class Replay:
    """Drafted and accepted tokens per pass."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def decoded(self) -> int:
        """Tokens from passes: each gives what it accepted and one more."""
        return sum(self.accepted) + len(self.accepted)


def replay(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], most: int) -> Replay:
    """Replays a whole request; see `replay_output`."""
    drafter.reset(prompt)
    found = replay_output(drafter, prompt, output, most)
    drafter.finish()
    return found


def replay_output(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], most: int) -> Replay:
    """Replays `output`, whose first token the prefill gives, with at most `most` drafts a pass."""
    drafter.observe(output[:1], 0)
    context = [*prompt, output[0]]
    drafted, accepted = [], []
    done = 1
    while done < len(output):
        limit = min(most, len(output) - done - 1)
        draft = drafter.propose(context, limit).tokens if limit else ()
        right = agreement(draft, output[done:])
        emitted = output[done : done + right + 1]
        drafter.observe(emitted, right)
        context += emitted
        done += len(emitted)
        drafted.append(len(draft))
        accepted.append(right)
    return Replay(tuple(drafted), tuple(accepted))
