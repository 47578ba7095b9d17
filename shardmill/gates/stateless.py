"""Parity of programs without state between passes: slices of the LM head, and groups of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from shardmill.gates.disturbed import probe
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.naming import Weights
from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import gate_widths, relative_error, width_measure
from shardmill.gates.passes import compared_widths, filled_up, in_passes
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.routed import Call, choosing, none_taken, taken_in_turn
from shardmill.gates.weights import PackageWeights
from shardmill.lane.figures import psnr
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.host import Floats
from shardmill.plan import Part
from shardmill.runtime.functions import of_blueprint
from shardmill.runtime.program import Program, reused

Inputs = Callable[[list[int]], Mapping[str, Floats]]  # the numbers of a pass's rows -> the program's inputs


def _stateless_parity(
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
        passes = filled_up(in_passes(count, [width]), widths, slots=count + max(widths, default=0))
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
    yield from _stateless_parity(inputs, program, part, expected, original, verify, reference.model)


def experts_contribution(reference: Reference, part: Part, x: Tensor, weights: Weights) -> tuple[Call, Tensor]:
    """Return the call of the layer's experts, and the contribution of the group's experts to the layer's output [n, d].

    The contribution is a difference of two outputs, because only the layer knows its branch multiplier.

    Args:
        reference: transformers' model.
        part: the group.
        x: the layer's input, [n, d].
        weights: the weights of the whole layer.
    """

    def run() -> Tensor:
        return reference.layers(x, [part.layer], weights)[-1]

    with choosing(reference.model, part.layer, none_taken):
        without = run()
    with choosing(reference.model, part.layer, taken_in_turn(part.start, part.end)) as calls:
        difference = run() - without
    return calls[0], difference[:, : part.graph.hidden]


def group_parity(
    program: Path,
    part: Part,
    reference: Reference,
    known: Mapping[str, Tensor],
    source: Path,
    stored: PackageWeights,
    verify: int,
) -> Iterator[Measurement | NotRun]:
    """Yield all measurements of a group of experts; rounding.py measures its weights.

    Args:
        program: the compiled bundle.
        part: the part that was converted to the program.
        reference: transformers' model.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d].
        source: the checkpoint's folder.
        stored: the package's weights.
        verify: the most tokens of a decode pass.
    """
    original = checkpoint_weights(source, stored.prefix)
    call, exact = experts_contribution(reference, part, known["hidden"][part.layer], original)
    index, values = taken_in_turn(part.start, part.end)(call)
    z, shares = call.hidden.numpy(), Call(call.hidden, index, values).share(part.start, part.end).numpy()

    def inputs(numbers: list[int]) -> dict[str, Floats]:
        return {"x": _columns(z[numbers]), "weights": _columns(shares[numbers])}

    def expected() -> Tensor:
        return experts_contribution(reference, part, known["hidden"][part.layer], stored.over(original))[1]

    yield from _stateless_parity(inputs, program, part, expected, exact, verify, reference.model)


def _columns(rows: Floats) -> Floats:
    """Return [T, channels] in the layout of a program's inputs: [1, channels, T, 1]."""
    return rows.T[None, :, :, None]
