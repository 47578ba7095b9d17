"""Parity of programs without state between passes: slices of the LM head, and groups of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardmill.gates.disturbed import probe
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.naming import Weights
from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import gate_widths, relative_error, width_measure
from shardmill.gates.passes import Pass, compared_widths, filled_up, in_passes
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.routed import Call, choosing, none_taken, taken_in_turn
from shardmill.gates.weights import PackageWeights
from shardmill.kit_runner.figures import psnr
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.host import Floats
from shardmill.plan import Part
from shardmill.runtime.functions import of_blueprint
from shardmill.runtime.program import Program, reused


@dataclass(frozen=True)
class StatelessCase:
    """What a program without states is given, and transformers' result.

    Attributes:
        rows: the inputs by name, each [n, channels].
        expected: returns transformers' result with the weights that the package contains, [n, channels].
    """

    rows: Mapping[str, Floats]
    expected: Callable[[], Tensor]

    def feed(self, program: Any, width: int, widths: Sequence[int] = ()) -> Floats:
        """Feed all rows to a loaded program and return its outputs [n, channels].

        Args:
            program: is called as `runtime.program.Program` is.
            width: tokens of a pass.
            widths: the widths at which the program runs; passes are padded to them. Empty if it runs at any width.
        """
        count = len(next(iter(self.rows.values())))
        passes = filled_up(in_passes(count, [width]), widths, slots=count + max(widths, default=0))
        return np.concatenate([program(self._inputs(p))[0, :, :, 0].T[: p.kept] for p in passes])

    def _inputs(self, p: Pass) -> dict[str, Floats]:
        """Return the inputs of a pass, each [1, channels, T, 1]."""
        return {name: rows[list(p.tokens)].T[None, :, :, None] for name, rows in self.rows.items()}


def head_case(part: Part, reference: Reference, hidden: Tensor, stored: PackageWeights) -> StatelessCase:
    """Return the case of a slice of the LM head, given the last layer's output [n, d]."""
    rows = {"hidden": hidden.numpy() * np.float32(part.graph.stream_scale)}
    return StatelessCase(rows, lambda: reference.logits(hidden, stored.rows("lm_head.weight"), stored))


def experts_case(
    part: Part, reference: Reference, x: Tensor, source: Path, stored: PackageWeights
) -> tuple[StatelessCase, Tensor]:
    """Return the case of a group of experts, and the group's contribution with the original weights [n, d].

    Every token is routed to experts of the group in turn.

    Args:
        part: the group.
        reference: transformers' model.
        x: the layer's input with the original weights, [n, d].
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    weights = checkpoint_weights(source, stored.prefix)
    call, exact = _experts_contribution(reference, part, x, weights)
    index, values = taken_in_turn(part.start, part.end)(call)
    shares = Call(call.hidden, index, values).share(part.start, part.end)
    rows = {"x": call.hidden.numpy(), "weights": shares.numpy()}
    return StatelessCase(rows, lambda: _experts_contribution(reference, part, x, stored.over(weights))[1]), exact


def load_stateless(program: Path, part: Part) -> Callable[[], Program]:
    """Return a function that loads a part's program, once for each precision."""
    return reused(lambda: Program(program, False, of_blueprint(part.blueprint, part.calls)))


def _stateless_parity(
    case: StatelessCase, program: Path, part: Part, original: Tensor, verify: int, model: nn.Module
) -> Iterator[Measurement | NotRun]:
    """Answer the three questions for a program, given transformers' results for the same rows.

    Args:
        case: what the program is given, and transformers' result.
        program: the compiled bundle.
        part: the part that was converted to the program.
        original: transformers' result with the checkpoint's weights, [n, channels].
        verify: the most tokens of a decode pass.
        model: transformers' model, which the case calls.
    """
    load, widths, expected = load_stateless(program, part), gate_widths(part, verify), case.expected

    def run(width: int) -> Floats:
        return case.feed(load(), width, widths)

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
    case, original = head_case(part, reference, hidden, stored), logits[:, part.start : part.end]
    yield from _stateless_parity(case, program, part, original, verify, reference.model)


def _experts_contribution(reference: Reference, part: Part, x: Tensor, weights: Weights) -> tuple[Call, Tensor]:
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
    case, exact = experts_case(part, reference, known["hidden"][part.layer], source, stored)
    yield from _stateless_parity(case, program, part, exact, verify, reference.model)
