"""A model for the benchmark's tests: it counts to seven, over and over; also as a process:

python -m bench.scripted serve BUILD [OPTION ...]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from drafted_decoding.engine import PlainEngine
from serve.fake import byte_tokenizer

from shardmill.serve.model import Model

NAME = "counter"
VOCAB = 257
TURN = 7
PASS_SECONDS = 0.001  # of any width: were a pass free, whether drafts pay would hang on the machine's other work


class Counter(PlainEngine):
    """Says (last token + 1) mod 7, so that a text of 0 1 2 ... 6 repeated is what it expects."""

    vocab, widths = VOCAB, (1, 4)

    def __init__(self, slots: int = 256, end: int | None = None) -> None:
        self.slots, self.end, self.calls = slots, end, list[int]()

    def reset(self) -> None:
        """Nothing is held."""

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is held."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        assert len(tokens) in self.widths
        assert max(slots) < self.slots
        time.sleep(PASS_SECONDS)
        self.calls.append(len(tokens))
        following = [(token + 1) % TURN for token in tokens]
        return np.eye(VOCAB, dtype=np.float32)[[VOCAB - 1 if f == self.end else f for f in following]]


class Wider(Counter):
    """Says something else where a pass is wide and the prompt of 40 tokens is over."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        logits = super().forward(tokens, slots, positions)
        return np.roll(logits, 1, axis=1) if positions[0] >= 40 and len(tokens) > 1 else logits


def model(engine: Counter | None = None) -> Model:
    """The engine with the byte tokenizer; token 256 ends a text."""
    counter: Any = engine or Counter()
    return Model(name=NAME, engine=counter, engine_name="scripted", tokenizer=byte_tokenizer(), eos=(VOCAB - 1,))


if __name__ == "__main__":
    from shardmill import cli
    from shardmill.serve import model as serving

    serving.load_model = lambda *_: model()  # type: ignore[assignment]
    cli.main()
