"""`shardmill serve` with a fake model, as a process: python -m serve.process DELAY PASSES [OPTION ...].

After that many passes it waits for a line on stdin, once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardmill import cli
from shardmill.serve import model as serving

from .fake import Speaker, fake_model


class Halting(Speaker):
    """Waits for the test after some passes."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        if self.passes == PASSES:
            sys.stdin.readline()
        return super().forward(tokens, slots, positions)


if __name__ == "__main__":
    delay, PASSES = float(sys.argv.pop(1)), int(sys.argv.pop(1))
    serving.load_model = lambda *_: fake_model(Halting(slots=4096, delay=delay))  # type: ignore[assignment]
    sys.argv[1:1] = ["serve", "no-build-needed", "--no-check"]
    cli.main()
