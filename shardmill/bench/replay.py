"""Upper bound of acceptance: a known output is replayed, and every pass drafts the most tokens.

Live decoding accepts fewer: the width control drafts less if drafting would lose time, and on an engine whose rows
differ with the width of a pass the text itself may change. The replay uses a fresh drafter; a resident one may have
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
        """Return the number of tokens from passes: each gives its accepted drafts and one more."""
        return sum(self.accepted) + len(self.accepted)


def replay(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], most: int) -> Replay:
    """Replay a whole request; see `replay_output`."""
    drafter.reset(prompt)
    found = replay_output(drafter, prompt, output, most)
    drafter.finish()
    return found


def replay_output(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], most: int) -> Replay:
    """Replay `output`, whose first token comes from the prefill, with at most `most` drafts a pass."""
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
