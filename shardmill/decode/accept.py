"""Which of a pass's drafts the model itself would have produced, and the token that follows them.

A pass feeds `[pending, d1 .. dk]`. Row i holds the logits after the i-th fed token, so d(i+1) is right
when row i chooses it, and the row after the last right draft chooses the bonus token. A pass emits 1..k+1
tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Tokens that a pass emits; the first `accepted` of them are its drafts."""

    tokens: tuple[int, ...]
    accepted: int


def accept(
    choose: Callable[[int], int],
    draft: Sequence[int],
    eos: Collection[int],
    ends: Callable[[], bool] = lambda: False,
) -> Verdict:
    """Accepts the longest prefix of `draft` that equals the model's choices.

    Args:
        choose: the model's token after fed token i; called in order, and never past the first wrong draft.
        draft: the k tokens fed after the pending one.
        eos: tokens that end the text; one that is accepted ends the pass, without a bonus token.
        ends: asked after each accepted token: does it end the text for another reason?
    """
    tokens: list[int] = []
    for i, drafted in enumerate(draft):
        token = choose(i)
        tokens.append(token)
        if token != drafted:
            return Verdict(tuple(tokens), i)
        if token in eos or ends():
            return Verdict(tuple(tokens), i + 1)
    tokens.append(choose(len(draft)))
    return Verdict(tuple(tokens), len(draft))


def agreement(draft: Sequence[int], emitted: Sequence[int]) -> int:
    """How many tokens of `draft`, from the first on, equal those emitted."""
    for i, (drafted, token) in enumerate(zip(draft, emitted, strict=False)):
        if drafted != token:
            return i
    return min(len(draft), len(emitted))
