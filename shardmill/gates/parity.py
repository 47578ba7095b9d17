"""Parity of one part: three questions, each with its own numbers. Transformers answers them, never our own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardmill.figures import psnr, relative_error
from shardmill.gates import experts, routed
from shardmill.gates.disturbed import probe
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.naming import Weights
from shardmill.gates.nonfinite import explained
from shardmill.gates.passes import MOVING, REJECTED, Pass, as_shipped, at_lengths, filled_up, in_passes, schedules
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.routed import Call, choosing, none_taken, taken_in_turn
from shardmill.gates.thresholds import THRESHOLDS, Allowed
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.caches import CacheKind, cache_kind
from shardmill.models.contract import caches, lent_caches, pass_inputs
from shardmill.models.host import Floats, KVLayout
from shardmill.models.interface import LABELS, interface
from shardmill.plan import Part
from shardmill.runtime.program import HostCaches, Program, reused


@dataclass(frozen=True)
class Case:
    """A part's inputs and transformers' results, which are pieces of the output's channels, each [n, channels].

    Attributes:
        rows: the part's inputs by name, except the host's arrays, each [n, channels]; of lent caches, the rows of the
            tokens, [n, heads * head_dim].
        expected: returns the results with the weights that the package contains.
        original: returns the results with the original weights.
        model: transformers' model, which `expected` runs.
        routes: the experts that tokens are routed to with the original weights, by layer, each [n, chosen].
    """

    rows: Mapping[str, Floats]
    expected: Callable[[], list[Tensor]]
    original: Callable[[], list[Tensor]]
    model: nn.Module
    routes: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return len(next(iter(self.rows.values())))


def part_case(
    part: Part, reference: Reference, known: Mapping[str, Tensor], source: Path, stored: PackageWeights
) -> Case:
    """Return the case of a part of layers, a group of experts, or some rows of the LM head.

    Args:
        part: the part.
        reference: transformers' model.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d], logits
            [n or more, vocab] for a head, and experts if the model has any.
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    hidden, model = known["hidden"], reference.model
    if part.blueprint.kind == "head":
        tokens = part.row_tokens if part.kind == LABELS else slice(part.start, part.end)
        last, exact = hidden[-1], known["logits"][: hidden.shape[1], tokens]
        rows, head = {"hidden": last.numpy()}, partial(stored.rows, "lm_head.weight")

        def weights(name: str) -> Tensor:  # a bias of labels has other rows than the checkpoint's
            return stored.values(name) if name == "lm_head.bias" else stored(name)

        return Case(rows, lambda: [reference.logits(last, head(), weights)], lambda: [exact], model)
    original = checkpoint_weights(source, stored.prefix)  # the experts' weights may be in other packages
    if part.kind == "experts":
        return _experts_case(part, reference, hidden[part.layer], original, stored.over(original))
    x, split, given = hidden[part.start], part.blueprint.ends_in_experts, dict[str, Floats]()
    if width := part.graph.per_layer:
        reference.given(hidden[0], known["rows"])
        pieces = enumerate(torch.split(known["rows"], width, dim=1))
        given = {"embedded": hidden[0].numpy(), **{f"p_{i}": rows.numpy() for i, rows in pieces}}
    for i, _ in part.lent:
        found = reference.shared_caches(hidden[i], i, original)  # of one type of layers
        reference.lent |= found
        pairs = (zip("kv", pair, strict=True) for pair in found.values())
        given |= {f"{name}_{i}": each[0].transpose(0, 1).flatten(1).numpy() for pair in pairs for name, each in pair}
    held = stored.over(original) if split else stored

    def exact_end() -> list[Tensor]:
        # The exact weights of the experts are left out: if a choice differs, they differ entirely; choices are counted
        # apart.
        return _at_end(reference, part, x, original)[:-1] if split else [hidden[part.end]]

    indices = range(part.start, part.end) if "experts" in known else ()
    routes = {index: known["experts"][index] for index in indices}
    return Case({"x": x.numpy()} | given, lambda: _at_end(reference, part, x, held), exact_end, model, routes)


def _at_end(reference: Reference, part: Part, x: Tensor, weights: Weights) -> list[Tensor]:
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


def _experts_case(part: Part, reference: Reference, x: Tensor, original: Weights, held: Weights) -> Case:
    """Return the case of a group of experts: every token is routed to experts of the group in turn.

    Args:
        part: the group.
        reference: transformers' model.
        x: the layer's input with the original weights, [n, d].
        original: the checkpoint's weights of the whole layer.
        held: the same with the weights that the package contains.
    """
    call, exact = _experts_contribution(reference, part, x, original)
    index, values = taken_in_turn(part.start, part.end)(call)
    shares = Call(call.hidden, index, values).share(part.start, part.end)
    rows = {"x": call.hidden.numpy(), "weights": shares.numpy()}
    return Case(rows, lambda: [_experts_contribution(reference, part, x, held)[1]], lambda: [exact], reference.model)


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


def _gate_widths(part: Part, verify: int) -> tuple[int, ...]:
    """Return the widths at which a gate runs a part's program; empty if it may run at any width.

    The first pass of a width takes Core ML minutes. On Core ML a narrower pass is therefore padded, as a session pads
    it, and all widths that decoding uses are compared in the whole stack. A program of fixed widths pads by itself.
    """
    return () if is_portable() or part.calls.functions else (verify, part.tokens)


class PartRunner:
    """A part, run by hand through MLModel.predict; KVLayout computes the host's arrays for a part of layers."""

    def __init__(self, program: Path, part: Part, runtime: Mapping[str, Any]) -> None:
        """Store the arguments; the program is loaded at the first pass.

        Args:
            program: the compiled bundle.
            part: the part that was converted to the program: layers, a group of experts, or rows of the LM head.
            runtime: the parameters of KVLayout, see plan.json's "runtime".
        """
        self.program, self.part, self.runtime = program, part, runtime
        self.names = [name for name in pass_inputs(part.blueprint) if name not in caches(part.blueprint)]
        self.widths = _gate_widths(part, runtime["verify"])
        self.loaded = reused(self._load)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths in slots of the contexts that the program has functions for, ascending.

        There is only one length if the functions accept any context.
        """
        return (*self.part.calls.contexts, self.part.slots)

    def _load(self) -> Program:
        """Load the program, in its shortest context if it has functions for several."""
        return Program(self.program, interface(self.part.blueprint, self.part.calls), self.part.slots)

    def run(self, rows: Mapping[str, Floats], passes: Iterable[Pass]) -> tuple[Floats, dict[str, Floats]]:
        """Run passes from empty states, in the whole context unless they name another.

        Args:
            rows: the inputs by name, each [n, channels], in the model's units.
            passes: these keep each of the n rows once, in order.

        Returns:
            Outputs [n, channels], and by name the states' contents for the tokens.
        """
        layers, passes, kept = self.part.kind == "layers", list(passes), []
        program, host, used = self.loaded(), KVLayout(self.runtime) if layers else None, passes[-1].positions[-1] + 1
        program.move(passes[0].slots or self.part.slots, keep=False)
        program.renew()
        scale = np.float32(1 if self.part.kind == "experts" else self.part.graph.stream_scale)
        room = self.part.slots if layers else used + max(self.widths, default=0)
        lent = HostCaches({name: name for name in lent_caches(self.part.blueprint)}, self._lent(passes[0].slots))
        for p in filled_up(passes, self.widths, room):
            if host and p.slots:
                program.move(p.slots)
                host.resize(p.slots)
                lent.resize(self._lent(p.slots))
            given = host.arrays(p.places, p.positions) if host else {}
            taken = {name: values[list(p.tokens)] for name, values in rows.items()}  # each [T, channels]
            lent.write({name: _by_head(taken[name], shape) for name, shape in lent.shapes.items()}, given)
            given |= lent.arrays
            given |= {name: each.T[None, :, :, None] * scale for name, each in taken.items() if name not in lent.shapes}
            result = program({name: given[name] for name in self.names})[0, :, :, 0].T  # [T, channels]
            kept.append((result if self.part.blueprint.kind in ("head", "experts") else result / scale)[: p.kept])
        outputs = np.concatenate(kept)
        # How rows lie in memory decides the last digit of sums over them, and so of a verdict's figures.
        left = self._states(program, host, used, passes[-1].offset) if host else {}
        return (np.ascontiguousarray(outputs) if layers else outputs), left

    def _lent(self, slots: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the lent caches that the part reads, in a context of some slots; 0 for the whole."""
        return lent_caches(replace(self.part.blueprint, slots=slots or self.part.slots))

    def _states(self, program: Program, host: KVLayout, used: int, offset: int) -> dict[str, Floats]:
        """Return the states' contents for the first `used` positions; a ring contains only the last positions.

        The state of a recurrence is left out. The passes decide how far it is folded, and its content shows in
        the outputs.
        """
        found, g = {}, self.part.graph
        taps = g.recurrence.taps if g.recurrence else g.conv_taps
        for name in caches(self.part.blueprint):
            kind = cache_kind(name)
            if kind is CacheKind.STATE:
                continue
            values = program.kept(name)
            if kind is CacheKind.RING:
                found[name] = values[0, 0][:, host.ring_slots(range(max(used - taps + 1, 0), used))].T
            elif (slots := values.shape[2]) == self.runtime["window_slots"]:
                found[name] = values[0][:, np.arange(max(used - self.runtime["window"] + 1, 0), used) % slots]
            else:
                found[name] = values[0, :, offset : offset + used]
        return found


def _by_head(rows: Floats, shape: tuple[int, ...]) -> Floats:
    """Return rows [T, heads * head_dim] of a cache of this shape as a program returns them, [1, heads, T, head_dim]."""
    return rows.reshape(len(rows), shape[1], shape[3]).swapaxes(0, 1)[None]


def part_schedules(part: Part, count: int, verify: int) -> dict[str, list[Pass]]:
    """Return the schedules to test, by name; a part without states needs passes of each width only."""
    ways = schedules(count, verify, part.tokens, part.blueprint.blocks > 1)
    return ways if part.kind == "layers" else {name: passes for name, passes in ways.items() if name.startswith("T=")}


def part_parity(runner: PartRunner, case: Case) -> Iterator[Measurement | NotRun]:
    """Yield all measurements of a part's program; rounding.py measures its weights."""
    part, rows, where = runner.part, case.rows, runner.program
    narrow = partial(runner.run, rows, list(in_passes(case.count, [1])))
    passes = as_shipped(case.count, runner.runtime["verify"], part.tokens, part.blueprint.blocks > 1)
    fed = partial(runner.run, rows, list(passes))
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
        if probed.hopeless:
            yield NotRun("width_error_fp16", probed.hopeless)
        else:
            yield from width_measurements(runner, rows, plain, states, probed.allowed)
    with load_programs_as("fp16"):
        shipped, _ = fed()
        yield explained(Measurement("psnr", _worst(np.min, psnr, shipped, case.original())), fed, where)
        if is_portable() and case.routes:
            choices = _choices(runner, case, part.tokens, case.routes, "fp16")
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
    runner: PartRunner, case: Case, width: int, truth: Mapping[int, Tensor], precision: str
) -> experts.ChoiceComparison | None:
    """Compare the experts that the part's layers choose with transformers'; None if no layer has experts.

    Args:
        runner: runs the part's program.
        case: the part's inputs.
        width: tokens of a pass.
        truth: indices of the experts by layer, [n, chosen].
        precision: the precision in which the program computes.
    """
    mixtures = [i for i, kind in runner.part.blueprint.layers if kind.ffn == "experts"]
    if not mixtures:
        return None
    function = runner.part.calls.functions.get(width, "")
    # If a pass is run by another function, or padded, its choices can't be found by their names.
    count = case.count - (case.count % width if runner.part.calls.functions else 0)
    run = partial(runner.run, _first(case.rows, count), list(in_passes(count, [width])))
    found = experts.chosen_by(runner.program, function, len(mixtures), run)
    jitter = options.jitter if (options := runner.part.graph.experts) else 0.0
    return experts.compare_choices(found, [truth[i][:count] for i in mixtures], precision, jitter)


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
    moving = at_lengths(len(plain), part.calls.widths, verify, runner.lengths)
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
    "speculation_mismatches": "in fp16 another width rounds otherwise, and close calls fall either way",
    "argmax_mismatches": IN_FP32,
}


def not_run() -> dict[str, str]:
    """Return the measurements that this machine can't make, each with the reason."""
    return {} if is_portable() else NOT_RUN
