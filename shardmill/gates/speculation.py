"""Speculation: the decoding loop that ships, on the real programs, with drafts that are right and wrong in turn.

Its tokens must equal the tokens of one token a pass. The latter are computed here without the loop, so that the loop
does not judge itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.decode import Engine, Session, run
from shardmill.decode.drafters import PLAIN, Draft, RequestInfo
from shardmill.decode.policies import AlwaysDraft

NEW_TOKENS = 40


class TurningDrafter:
    """A drafter that proposes the true continuation with one wrong token, one place later in each draft, then none.

    Attributes:
        misjudged: number of passes that did not accept exactly the drafts before the wrong one.
    """

    name = "turning"

    def __init__(self, prompt: int, truth: Sequence[int], vocab: int) -> None:
        self.prompt, self.truth, self.vocab = prompt, truth, vocab
        self.turn = self.right = self.misjudged = 0

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """Start again with a draft whose first token is wrong."""
        self.turn = 0

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Draft at most `limit` tokens to follow `context`."""
        done = len(context) - self.prompt
        tokens = list(self.truth[done : done + limit])
        wrong = self.turn % (limit + 1)
        self.turn += 1
        if wrong < len(tokens):
            tokens[wrong] = (tokens[wrong] + 1) % self.vocab
        self.right = min(wrong, len(tokens))
        return Draft(tuple(tokens))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Count a pass that did not accept exactly the drafts before the wrong one."""
        self.misjudged += accepted != self.right
        self.right = 0  # a pass without room for drafts calls no `propose`

    def finish(self) -> None:
        """Do nothing: there is nothing to release."""


def one_by_one(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Generate `count` tokens greedily, one token a pass."""
    engine.reset()
    tokens = list(prompt)
    for at in range(len(prompt) + count - 1):
        row = engine.forward([tokens[at]], [at], [at])[0]  # [V]
        if at + 1 == len(tokens):
            tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


def mismatches(engine: Engine, prompt: Sequence[int]) -> tuple[int, str]:
    """Count tokens of a greedy text that drafting changes and passes that misjudge their drafts.

    The second result is a text with the number of accepted drafts.
    """
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
