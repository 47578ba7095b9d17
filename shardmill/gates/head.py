"""Parity of a slice of the LM head: its logits, against those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.passes import cut
from shardmill.gates.reference import Reference
from shardmill.gates.stateless import stateless_parity
from shardmill.gates.weights import PackageWeights
from shardmill.models.host import Floats
from shardmill.plan import Part
from shardmill.runtime.functions import of_blueprint
from shardmill.runtime.program import Program


def head_parity(
    program: Path,
    part: Part,
    reference: Reference,
    known: tuple[Tensor, Tensor],
    stored: PackageWeights,
    verify: int,
) -> Iterator[Measurement | NotRun]:
    """All measurements of a head part but those of its weights.

    Args:
        program: the compiled bundle.
        part: what it was made from.
        reference: transformers' model.
        known: the last layer's output [n, d] and the logits [n, vocab], both with the original weights.
        stored: the package's weights.
        verify: the most tokens of a decode pass.
    """
    hidden, logits = known
    rows = hidden.numpy() * np.float32(part.graph.stream_scale)

    def run(width: int) -> Floats:
        head = Program(program, False, of_blueprint(part.blueprint, part.calls))
        chunks = [rows[list(p.tokens)].T[None, :, :, None] for p in cut(len(rows), [width])]
        return np.concatenate([head({"hidden": chunk})[0, :, :, 0].T for chunk in chunks])

    def expected() -> Tensor:
        return reference.logits(hidden, stored.rows("lm_head.weight"), stored)

    yield from stateless_parity(run, program, part, expected, logits[:, part.start : part.end], verify, reference.model)
