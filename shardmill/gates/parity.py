"""Parity of one part, of any kind: three questions, each with its own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from kit_runner.figures import psnr, relative_error
from torch import Tensor

from shardmill.gates import encoder, experts, routed
from shardmill.gates.case import Case
from shardmill.gates.disturbed import probe
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.nonfinite import explained
from shardmill.gates.passes import MOVING, REJECTED, Pass, as_shipped, at_lengths, in_passes, one_by_one, part_schedules
from shardmill.gates.runner import PartRunner
from shardmill.gates.thresholds import THRESHOLDS, Allowed
from shardmill.machine import is_portable, load_programs_as
from shardmill.runtime.kv import Floats


def part_parity(runner: PartRunner, case: Case) -> Iterator[Measurement | NotRun]:
    """Yield all measurements of a part's program; rounding.py measures its weights."""
    part, rows, where = runner.part, case.rows, runner.program
    narrow, fed = (partial(runner.run, rows, passes) for passes in _plain_and_shipped(runner, case))
    with load_programs_as("fp32"):
        plain, states = narrow()
        with routed.observed(case.model) as chosen:
            expected = case.expected()
        if is_portable():
            choices = _choices(runner, case, 1, chosen, "fp32")
            count = choices.decided(_wrong(plain, expected)) if choices else case.count
            all_count = count == case.count
            before = "" if all_count else f"of {count} tokens, before a close call of experts that fell otherwise"
            worst = _worst(np.max, relative_error, plain[:count], [piece[:count] for piece in expected])
            yield explained(Measurement("program_error", worst, before), narrow, where)
            if choices:
                yield experts.choice_agreement("experts_agreement", choices.before(count))
        probed = probe(case.model, lambda: torch.cat(case.expected(), 1), torch.cat(expected, 1))
        if case.texts:
            yield from encoder.texts_apart(runner, case, probed.allowed)
        elif probed.hopeless:
            yield NotRun("width_error_fp16", probed.hopeless)
        else:
            yield from width_measurements(runner, rows, plain, states, probed.allowed)
    with load_programs_as("fp16"):
        shipped, _ = fed()
        yield explained(Measurement("psnr", _worst(np.min, psnr, shipped, case.original())), fed, where)
        if case.texts:
            yield from encoder.texts_in_fp16(runner, case)
        if is_portable() and case.routes:
            choices = _choices(runner, case, part.spec.tokens, case.routes, "fp16")
            if choices:
                yield experts.choice_agreement("experts_agreement_fp16", choices)


def _plain_and_shipped(runner: PartRunner, case: Case) -> tuple[list[Pass], list[Pass]]:
    """Return the passes with which others are compared, and passes as a runtime feeds them."""
    if case.texts:
        return one_by_one(case.texts), one_by_one(case.texts)
    verify, widest, pads = runner.runtime["verify"], runner.part.spec.tokens, runner.part.spec.blocks > 1
    return list(in_passes(case.count, [1])), list(as_shipped(case.count, verify, widest, pads))


def _wrong(rows: Floats, expected: Sequence[Tensor]) -> Tensor:
    """Return True for each token whose output [n, channels] has a larger error than the gate allows, [n]."""
    limit = THRESHOLDS["program_error"]
    errors = (
        _worst(np.max, relative_error, rows[i : i + 1], [piece[i : i + 1] for piece in expected])
        for i in range(len(rows))
    )
    return torch.tensor([not limit.holds(error) for error in errors])


def _worst(
    extreme: Callable[[list[float]], Any],
    measure: Callable[[Any, Any], float],
    rows: Floats,
    expected: Sequence[Tensor],
) -> float:
    """Return the extreme of a measure over pieces of the outputs [n, channels], split like the expected pieces.

    np.max and np.min keep a NaN wherever it stands. The outputs may have more channels than are expected.
    """
    edges = np.cumsum([piece.shape[1] for piece in expected])
    return float(extreme(list(map(measure, np.split(rows, edges, axis=1), expected))))


def _choices(
    runner: PartRunner, case: Case, width: int, truth: Mapping[int, Tensor], precision: str
) -> experts.ChoiceComparison | None:
    """Compare the experts that the part's layers choose with transformers'.

    None if no layer has experts, and for an encoder: a close call that fell otherwise would leave no token of its text
    to compare, since tokens see later ones.

    Args:
        runner: runs the part's program.
        case: the part's inputs.
        width: tokens of a pass.
        truth: indices of the experts by layer, [n, chosen].
        precision: the precision in which the program computes.
    """
    mixtures = [i for i, kind in runner.part.spec.layers if kind.ffn == "experts"]
    if not mixtures or case.texts:
        return None
    function = runner.part.spec.calls.functions.get(width, "")
    # If a pass is run by another function, or padded, its choices can't be found by their names.
    count = case.count - (case.count % width if runner.part.spec.calls.functions else 0)
    run = partial(runner.run, _first(case.rows, count), list(in_passes(count, [width])))
    choices = experts.chosen_by(runner.program, function, len(mixtures), run)
    jitter = options.jitter if (options := runner.part.spec.graph.experts) else 0.0
    return experts.compare_choices(choices, [truth[i][:count] for i in mixtures], precision, jitter)


def width_measurements(
    runner: PartRunner, rows: Mapping[str, Floats], plain: Floats, states: Mapping[str, Floats], within: Allowed
) -> Iterator[Measurement]:
    """Measure question 2: compare every other way to split the sequence with one token a pass.

    Args:
        runner: runs the part's program.
        rows: the part's inputs by name, each [n, channels].
        plain: the output with one token a pass, [n, channels].
        states: the states' contents after passes of one token, by name.
        within: how far apart the results may be.
    """
    verify, part = runner.runtime["verify"], runner.part
    moving = at_lengths(len(plain), part.spec.calls.widths, verify, runner.lengths)
    ways = part_schedules(part, len(plain), verify) | moving
    for name, passes in ways.items():
        fed = passes[-1].positions[-1] + 1  # all, unless a shorter context holds no more
        again = partial(runner.run, _first(rows, fed), passes)
        outputs, left = again()
        error = Measurement(width_measure(name), relative_error(outputs, plain[:fed]), name, within)
        yield explained(error, again, runner.program)
        if fed < len(plain) or not states:
            continue
        errors = [relative_error(left[key].ravel(), states[key].ravel()) for key in states]
        worst = float(np.max(errors))  # unlike max(), keeps a NaN wherever it stands
        measure = "width_state_error" if is_portable() else "width_error_fp16"
        yield explained(Measurement(measure, worst, f"state, {name}", within), again, runner.program)


def _first(rows: Mapping[str, Floats], count: int) -> dict[str, Floats]:
    """Return the first `count` rows of each input."""
    return {name: values[:count] for name, values in rows.items()}


def width_measure(schedule: str) -> str:
    """Return the name of a schedule's measurement; on Core ML, which has no fp32, the one that allows fp16 rounding."""
    if not is_portable():
        return "width_error_fp16"
    return "rejected_draft_error" if schedule in (REJECTED, MOVING) else "width_error"


# Measurements that only an engine with an fp32 mode can make, and why Core ML can't.
IN_FP32 = "Core ML computes in fp16 only; the portable engine on Linux answers it for the same package"
NOT_RUN = {
    "program_error": IN_FP32,
    "tower_error": IN_FP32,
    "faint_error": IN_FP32,
    "speculation_mismatches": "in fp16 another width rounds otherwise, and close calls fall either way",
    "argmax_mismatches": IN_FP32,
}


def not_run() -> dict[str, str]:
    """Return the measurements that this machine can't make, each with the reason."""
    return {} if is_portable() else NOT_RUN
