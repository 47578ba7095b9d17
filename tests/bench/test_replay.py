"""What a drafter would have got accepted: every pass drafts all it may, and the output is the known one."""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.bench.prompts import replay
from shardmill.decode import create_drafter
from shardmill.decode.drafters import PLAIN, Draft, RequestInfo


class Guesser:
    """Proposes the same tokens whatever came before, and remembers what it was told."""

    name = "guesser"

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.told, self.limits = tokens, list[tuple[list[int], int]](), list[int]()

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        self.text = list(prompt)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        assert list(context) == self.text
        self.limits.append(limit)
        return Draft(self.tokens[:limit])

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        self.text += emitted
        self.told.append((list(emitted), accepted))

    def finish(self) -> None:
        """Nothing is kept."""


def test_a_pass_gives_what_is_right_and_one_more() -> None:
    """The drafter sees the text as decoding would have shown it to it, and drafts never reach past the end."""
    drafter = Guesser(1, 2, 3)
    got = replay(drafter, [7, 8], [0, 1, 2, 9, 1, 5, 5, 1], 3)
    assert drafter.told == [([0], 0), ([1, 2, 9], 2), ([1, 5], 1), ([5], 0), ([1], 0)]
    assert (got.drafted, got.accepted) == ((3, 3, 1, 0), (2, 1, 0, 0))
    assert drafter.limits == [3, 3, 1]
    assert got.decoded == 7


def test_a_repeated_text_is_all_accepted() -> None:
    got = replay(create_drafter("ngram"), list(range(7)) * 3, [i % 7 for i in range(21)], 3)
    assert got.accepted == (3, 3, 3, 3, 3)


def test_without_drafts_a_pass_gives_one_token() -> None:
    assert replay(create_drafter("none"), [1, 2], [3, 4, 5], 3).accepted == (0, 0)
