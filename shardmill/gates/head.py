"""Parity of a slice of the LM head: its logits, compared with transformers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.reference import Reference
from shardmill.gates.stateless import stateless_parity
from shardmill.gates.weights import PackageWeights
from shardmill.models.host import Floats
from shardmill.plan import Part


def head_parity(
    program: Path,
    part: Part,
    reference: Reference,
    known: tuple[Tensor, Tensor],
    stored: PackageWeights,
    verify: int,
) -> Iterator[Measurement | NotRun]:
    """Yield all measurements of a head part; rounding.py measures its weights.

    Args:
        program: the compiled bundle.
        part: the part that was converted to the program.
        reference: transformers' model.
        known: the last layer's output [n, d] and the logits [n, vocab], both with the original weights.
        stored: the package's weights.
        verify: the most tokens of a decode pass.
    """
    hidden, logits = known
    rows = hidden.numpy() * np.float32(part.graph.stream_scale)

    def inputs(numbers: list[int]) -> dict[str, Floats]:
        return {"hidden": rows[numbers].T[None, :, :, None]}

    def expected() -> Tensor:
        return reference.logits(hidden, stored.rows("lm_head.weight"), stored)

    original = logits[:, part.start : part.end]
    yield from stateless_parity(inputs, program, part, expected, original, verify, reference.model)
