"""Parity of programs that keep nothing from pass to pass: slices of the LM head, and groups of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from shardmill.gates.disturbed import probe
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import relative_error, width_measure
from shardmill.gates.passes import compared_widths
from shardmill.lane.figures import psnr
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.host import Floats
from shardmill.plan import Part


def stateless_parity(
    run: Callable[[int], Floats],
    program: Path,
    part: Part,
    expected: Callable[[], Tensor],
    original: Tensor,
    verify: int,
    model: nn.Module,
) -> Iterator[Measurement | NotRun]:
    """Answers the three questions of a program, given what transformers makes of the same rows.

    Args:
        run: loads the program, feeds it all rows in passes of so many tokens, and returns its outputs [n, channels].
        program: the compiled bundle.
        part: what it was made from.
        expected: what transformers gives with the weights that the package holds, [n, channels].
        original: the same with the checkpoint's weights.
        verify: the most tokens of a decode pass.
        model: transformers', which `expected` calls.
    """
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
