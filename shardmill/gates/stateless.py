"""Parity of programs without state between passes: slices of the LM head, and groups of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from shardmill.gates.disturbed import probe
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import gate_widths, relative_error, width_measure
from shardmill.gates.passes import compared_widths, cut, filled_up
from shardmill.lane.figures import psnr
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.host import Floats
from shardmill.plan import Part
from shardmill.runtime.functions import of_blueprint
from shardmill.runtime.program import Program, reused

Inputs = Callable[[list[int]], Mapping[str, Floats]]  # the numbers of a pass's rows -> the program's inputs


def stateless_parity(
    inputs: Inputs,
    program: Path,
    part: Part,
    expected: Callable[[], Tensor],
    original: Tensor,
    verify: int,
    model: nn.Module,
) -> Iterator[Measurement | NotRun]:
    """Answer the three questions for a program, given transformers' results for the same rows.

    Args:
        inputs: returns the program's inputs for some of the rows.
        program: the compiled bundle.
        part: the part that was converted to the program.
        expected: returns transformers' result with the weights that the package contains, [n, channels].
        original: transformers' result with the checkpoint's weights, [n, channels].
        verify: the most tokens of a decode pass.
        model: transformers' model, which `expected` calls.
    """
    load = reused(lambda: Program(program, False, of_blueprint(part.blueprint, part.calls)))
    widths, count = gate_widths(part, verify), len(original)

    def run(width: int) -> Floats:
        """Feed all rows in passes of a width and return the outputs [n, channels]."""
        passes = filled_up(cut(count, [width]), widths, slots=count + max(widths, default=0))
        return np.concatenate([load()(inputs(list(p.tokens)))[0, :, :, 0].T[: p.kept] for p in passes])

    with load_programs_as("fp32"):
        plain = run(1)
        exact = expected()
        if is_portable():
            error = Measurement("program_error", relative_error(plain, exact))
            yield explained(error, partial(run, 1), program)
        probed = probe(model, expected, exact)
        if probed.hopeless:
            yield NotRun("width_error_fp16", probed.hopeless)
        for width in () if probed.hopeless else compared_widths(verify, part.tokens):
            name = f"T={width}"
            error = Measurement(width_measure(name), relative_error(run(width), plain), name, probed.allowed)
            yield explained(error, partial(run, width), program)
    with load_programs_as("fp16"):
        ratio = Measurement("psnr", psnr(run(part.tokens), original))
        yield explained(ratio, partial(run, part.tokens), program)
