"""Speculation: the decoding loop that ships, on the real programs, with drafts that are right and wrong in turn.

Its tokens must be those of one token a pass, which are taken here by hand, so that nothing of the loop judges itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.decode import Engine, Session, run
from shardmill.decode.drafters import PLAIN, Draft, RequestInfo
from shardmill.decode.policies import AlwaysDraft

NEW_TOKENS = 40


class TurningDrafter:
    """Knows what comes, and says one token of it wrong: in turn each one that it drafts, then none.

    Attributes:
        misjudged: passes that accepted more or fewer drafts than stood before the wrong one.
    """

    name = "turning"

    def __init__(self, prompt: int, truth: Sequence[int], vocab: int) -> None:
        self.prompt, self.truth, self.vocab = prompt, truth, vocab
        self.turn = self.right = self.misjudged = 0

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """Begins again."""
        self.turn = 0

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """At most `limit` tokens to follow `context`."""
        done = len(context) - self.prompt
        tokens = list(self.truth[done : done + limit])
        wrong = self.turn % (limit + 1)
        self.turn += 1
        if wrong < len(tokens):
            tokens[wrong] = (tokens[wrong] + 1) % self.vocab
        self.right = min(wrong, len(tokens))
        return Draft(tuple(tokens))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """The right ones before the wrong one are those to accept."""
        self.misjudged += accepted != self.right

    def finish(self) -> None:
        """Nothing is held."""


def one_by_one(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens, one a pass."""
    engine.reset()
    tokens = list(prompt)
    for at in range(len(prompt) + count - 1):
        row = engine.forward([tokens[at]], [at], [at])[0]  # [V]
        if at + 1 == len(tokens):
            tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


def mismatches(engine: Engine, prompt: Sequence[int]) -> tuple[int, str]:
    """Tokens of a greedy text that drafting changes and passes that misjudge their drafts; and how the drafts fared."""
    count = min(NEW_TOKENS, engine.slots - len(prompt))
    truth = one_by_one(engine, prompt, count)
    drafter = TurningDrafter(len(prompt), truth, engine.vocab)
    engine.reset()
    found = run(Session(engine), prompt, max_new_tokens=count, drafter=drafter, policy=AlwaysDraft())
    pairs = zip(found.tokens, truth, strict=False)
    wrong = sum(a != b for a, b in pairs) + abs(len(truth) - len(found.tokens))
    return (
        wrong + drafter.misjudged,
        f"{sum(found.accepted)} of {sum(found.drafted)} drafts accepted in {count} tokens",
    )
