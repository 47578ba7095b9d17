"""Parity of one part: three questions, each with its own numbers. Transformers answers them, never our own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmill.gates import disturbed, experts, routed
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.naming import Weights
from shardmill.gates.nonfinite import explained
from shardmill.gates.passes import MOVING, REJECTED, Pass, at_lengths, filled_up, in_passes, schedules
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.routed import choosing, none_taken
from shardmill.gates.thresholds import THRESHOLDS, Allowed
from shardmill.gates.weights import PackageWeights
from shardmill.kit_runner.figures import psnr
from shardmill.kit_runner.figures import relative_error as relative_error
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.contract import RING, caches, inputs
from shardmill.models.host import Floats, KVLayout
from shardmill.plan import Part
from shardmill.runtime.functions import held_by_blueprint, lengths_by_blueprint, of_blueprint
from shardmill.runtime.program import Program, reused


def at_end(reference: Reference, part: Part, x: Tensor, weights: Weights) -> list[Tensor]:
    """Return the expected `hidden` output of a part, as pieces of its channels, each [n, channels].

    Normally that is one piece, the hidden states. If the part ends before experts, there are three pieces: the layer's
    output without the experts' contribution, the experts' input, and the weight of each expert.

    Args:
        reference: transformers' model.
        part: a part of layers.
        x: the part's input, [n, d].
        weights: the weights of the part's layers, including the experts.
    """
    indices, experts = range(part.start, part.end), part.graph.experts
    if experts is None or not part.blueprint.ends_in_experts:
        return reference.layers(x, indices, weights)[-1:]
    with choosing(reference.model, part.end - 1, none_taken) as calls:
        stream = reference.layers(x, indices, weights)[-1]
    (call,) = calls
    return [stream, call.hidden, call.share(0, experts.count)]


def gate_widths(part: Part, verify: int) -> tuple[int, ...]:
    """Return the widths at which a gate runs a part's program; empty if it may run at any width.

    The first pass of a width takes Core ML minutes. On Core ML a narrower pass is therefore padded, as a session pads
    it, and all widths that decoding uses are compared in the whole stack. A program of fixed widths pads by itself.
    """
    return () if is_portable() or part.calls.functions else (verify, part.tokens)


class LayersRunner:
    """A layers part, run by hand through MLModel.predict, with the host's arrays computed by the contract's Host."""

    def __init__(self, program: Path, part: Part, runtime: Mapping[str, Any]) -> None:
        """Store the arguments; the program is loaded at the first pass.

        Args:
            program: the compiled bundle.
            part: the part that was converted to the program.
            runtime: the parameters of the contract's Host, see plan.json's "runtime".
        """
        self.program, self.part, self.runtime = program, part, runtime
        self.names = [name for name in inputs(part.blueprint) if name not in caches(part.blueprint)]
        self.widths = gate_widths(part, runtime["verify"])
        self.loaded = reused(self._load)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths in slots of the contexts that the program has functions for, ascending.

        There is only one length if the functions accept any context.
        """
        return (*self.part.calls.contexts, self.part.slots)

    def _load(self) -> Program:
        """Load the program, in its shortest context if it has functions for several."""
        whole, calls = self.part.blueprint, self.part.calls
        each = {slots: replace(whole, slots=slots) for slots in self.lengths}
        functions, held = of_blueprint(whole, calls), held_by_blueprint(whole)
        return Program(self.program, not whole.hosted, functions, held, lengths=lengths_by_blueprint(each, calls))

    def run(self, rows: Floats, passes: Iterable[Pass]) -> tuple[Floats, dict[str, Floats]]:
        """Run passes from empty states, in the whole context unless they name another.

        Returns:
            Outputs [n, channels] for inputs [n, d], and by name the states' contents for the tokens.
        """
        program, host, passes = self.loaded(), KVLayout(self.runtime), list(passes)
        program.move(passes[0].slots or self.part.slots, keep=False)
        program.renew()
        scale = np.float32(self.part.graph.stream_scale)
        outputs = np.zeros((len(rows), 0), np.float32)  # replaced when the first result shows how wide it is
        for p in filled_up(passes, self.widths, self.part.slots):
            if p.slots:
                program.move(p.slots)
                host.resize(p.slots)
            given = host.arrays(p.places, p.positions)
            given["x"] = rows[list(p.tokens)].T[None, :, :, None] * scale  # [1, d, T, 1]
            result = program({name: given[name] for name in self.names})[0, :, :, 0].T / scale  # [T, d]
            outputs = outputs if outputs.size else np.zeros((len(rows), result.shape[1]), np.float32)
            outputs[list(p.positions[: p.kept])] = result[: p.kept]
        return outputs, self.states(program, len(rows), passes[-1].offset)

    def states(self, program: Program, used: int, offset: int = 0) -> dict[str, Floats]:
        """Return the states' contents for the first `used` positions; a ring contains only the last positions."""
        found = {}
        for name in caches(self.part.blueprint):
            values = program.kept(name)
            if name.startswith("c_"):
                kept = np.arange(max(used - self.part.graph.conv_taps + 1, 0), used) % RING
                found[name] = values[0, 0][:, kept].T
            elif (slots := values.shape[2]) == self.runtime["window_slots"]:
                found[name] = values[0][:, np.arange(max(used - self.runtime["window"] + 1, 0), used) % slots]
            else:
                found[name] = values[0, :, offset : offset + used]
        return found


def layers_parity(
    runner: LayersRunner, reference: Reference, known: Mapping[str, Tensor], source: Path, stored: PackageWeights
) -> Iterator[Measurement | NotRun]:
    """Yield all measurements of a layers part; rounding.py measures its weights.

    Args:
        runner: the part's program.
        reference: transformers' model.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d], and experts
            if the model has any.
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    part, indices, boundaries = runner.part, range(runner.part.start, runner.part.end), known["hidden"]
    x, split = boundaries[part.start], part.blueprint.ends_in_experts
    original = checkpoint_weights(source, stored.prefix)  # the experts' weights may be in other packages
    held = stored.over(original) if split else stored
    with load_programs_as("fp32"):
        plain, states = runner.run(x.numpy(), in_passes(len(x), [1]))
        with routed.observed(reference.model) as chosen:
            expected = at_end(reference, part, x, held)
        if is_portable():
            choices = _choices(runner, x.numpy(), 1, chosen, "fp32")
            count = choices.decided(_wrong(plain, expected)) if choices else len(x)
            before = "" if count == len(x) else f"of {count} tokens, before a close call of experts that fell otherwise"
            worst = _worst(np.max, relative_error, plain[:count], [piece[:count] for piece in expected])
            error = Measurement("program_error", worst, before)
            yield explained(error, lambda: runner.run(x.numpy(), in_passes(len(x), [1])), runner.program)
            if choices:
                yield experts.choice_agreement("experts_agreement", choices.before(count))
        again = partial(at_end, reference, part, x, held)
        probed = disturbed.probe(reference.model, lambda: torch.cat(again(), 1), torch.cat(expected, 1))
        if probed.hopeless:
            yield NotRun("width_error_fp16", probed.hopeless)
        else:
            yield from width_measurements(runner, x.numpy(), plain, states, probed.allowed)
    with load_programs_as("fp16"):
        shipped, _ = runner.run(x.numpy(), in_passes(len(x), [part.tokens]))
        # The exact weights of the experts are left out: if a choice differs, they differ entirely; choices are counted
        # below.
        exact = at_end(reference, part, x, original)[:-1] if split else [boundaries[part.end]]
        ratio = Measurement("psnr", _worst(np.min, psnr, shipped, exact))
        yield explained(ratio, lambda: runner.run(x.numpy(), in_passes(len(x), [part.tokens])), runner.program)
        if is_portable() and "experts" in known:
            rows = dict(zip(indices, known["experts"][part.start : part.end], strict=True))
            choices = _choices(runner, x.numpy(), part.tokens, rows, "fp16")
            if choices:
                yield experts.choice_agreement("experts_agreement_fp16", choices)


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
    runner: LayersRunner, x: Floats, width: int, truth: Mapping[int, Tensor], precision: str
) -> experts.ChoiceComparison | None:
    """Compare the experts that the part's layers choose with transformers'; None if no layer has experts.

    Args:
        runner: runs the part's program.
        x: the part's input, [n, d].
        width: tokens of a pass.
        truth: indices of the experts by layer, [n, chosen].
        precision: the precision in which the program computes.
    """
    mixtures = [i for i, kind in runner.part.blueprint.layers if kind.ffn == "experts"]
    if not mixtures:
        return None
    function = runner.part.calls.functions.get(width, "")
    # If a pass is run by another function, or padded, its choices can't be found by their names.
    count = len(x) - (len(x) % width if runner.part.calls.functions else 0)
    run = partial(runner.run, x[:count], list(in_passes(count, [width])))
    found = experts.chosen_by(runner.program, function, len(mixtures), run)
    jitter = options.jitter if (options := runner.part.graph.experts) else 0.0
    return experts.compare_choices(found, [truth[i][:count] for i in mixtures], precision, jitter)


def width_measurements(
    runner: LayersRunner, x: Floats, plain: Floats, states: Mapping[str, Floats], within: Allowed
) -> Iterator[Measurement]:
    """Measure question 2: compare every other way to split the sequence with one token a pass.

    Args:
        runner: runs the part's program.
        x: the part's input, [n, d].
        plain: the output with one token a pass, [n, d].
        states: the states' contents after passes of one token, by name.
        within: how far apart the results may be.
    """
    verify, upper = runner.runtime["verify"], runner.part.tokens
    ways = schedules(len(x), verify, upper) | at_lengths(len(x), runner.part.calls.widths, verify, runner.lengths)
    for name, passes in ways.items():
        fed = passes[-1].positions[-1] + 1  # all, unless a shorter context holds no more
        outputs, left = runner.run(x[:fed], passes)
        again = partial(runner.run, x[:fed], passes)
        error = Measurement(width_measure(name), relative_error(outputs, plain[:fed]), name, within)
        yield explained(error, again, runner.program)
        if fed < len(x):
            continue
        errors = [relative_error(left[key].ravel(), states[key].ravel()) for key in states]
        worst = float(np.max(errors))  # unlike max(), keeps a NaN wherever it stands
        measure = "width_state_error" if is_portable() else "width_error_fp16"
        yield explained(Measurement(measure, worst, f"state, {name}", within), again, runner.program)


def width_measure(schedule: str) -> str:
    """Return the name of a schedule's measurement; on Core ML, which has no fp32, the one that allows fp16 rounding."""
    if not is_portable():
        return "width_error_fp16"
    return "rejected_draft_error" if schedule in (REJECTED, MOVING) else "width_error"


# Measurements that only an engine with an fp32 mode can make, and why Core ML can't.
NOT_RUN = {
    "program_error": "Core ML computes in fp16 only; the portable engine on Linux answers it for the same package",
    "speculation_mismatches": "in fp16 another width rounds otherwise, and close calls fall either way",
    "argmax_mismatches": "Core ML computes in fp16 only; the portable engine on Linux answers it for the same package",
}


def not_run() -> dict[str, str]:
    """Return the measurements that this machine can't make, each with the reason."""
    return {} if is_portable() else NOT_RUN
