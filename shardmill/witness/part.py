"""The results of Apple's runtime for a part, compared with transformers and with the portable engine.

All three use the weights that the package stores, and the same inputs: the hidden states that the reference step
recorded. So a difference comes from the graphs or the arithmetic, not from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kit_runner.figures import relative_error
from torch import Tensor

from shardmill.gates.case import part_case
from shardmill.gates.encoder import encoder_case, known_of
from shardmill.gates.encoder_reference import EncoderReference, passages
from shardmill.gates.measurement import Measurement, NotRun, compare
from shardmill.gates.passes import compared_widths, in_passes, one_by_one, part_schedules
from shardmill.gates.reference import Reference, carried_channels, checkpoint_weights
from shardmill.gates.runner import PartRunner
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.part_kinds import PART_KINDS
from shardmill.plan import Part
from shardmill.runtime.kv import Floats
from shardmill.runtime.program import Program
from shardmill.witness.coreai import CoreAIProgram

TOKENS = 16  # of the parity text: Apple's interpreter takes seconds for a pass of a large part
PLAIN = "T=1"

Run = Callable[..., Floats]  # a loaded program, and `name` of a schedule -> outputs [n, channels]


@dataclass(frozen=True)
class WitnessCase:
    """A part with its inputs and transformers' results.

    Attributes:
        expected: transformers' results with the stored weights, as pieces of their channels, each [n, channels].
        schedules: names of the ways to split the text into passes; the others are compared with the first.
        run: feeds the text in one of these ways to a program.
        portable: loads the part's program for the engine that this machine has.
        program: the part that is built as a Core AI program.
        widths: the widths of the Core AI program's entry points.
    """

    expected: list[Tensor]
    schedules: tuple[str, ...]
    run: Run
    portable: Callable[[], Any]
    program: Part
    widths: tuple[int, ...]


def witness_measurements(
    part: Part, bundle: Path, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: PackageWeights
) -> Iterator[Measurement | NotRun]:
    """Yield the measurements of a part.

    Args:
        part: layers, a group of experts, a slice of the LM head, or an encoder.
        bundle: the part's compiled program.
        plan: plan.json's content.
        known: what the reference step wrote.
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    case = witness_case(part, bundle, plan, known, source, stored)
    program = CoreAIProgram(case.program.spec, stored.stored, case.widths)
    outputs = program.run({name: partial(case.run, name=name) for name in case.schedules})
    plain = outputs[case.schedules[0]]
    edges = np.cumsum([piece.shape[1] for piece in case.expected])
    split = zip(np.split(plain, edges, axis=1), case.expected, strict=False)
    yield Measurement("witness_error", float(np.max([relative_error(got, want) for got, want in split])))
    for name in case.schedules[1:]:
        yield Measurement("witness_width_error", relative_error(outputs[name], plain), name)
    if not is_portable():
        yield NotRun("witness_agreement", "Core ML computes in fp16 only; on Linux the portable engine is compared")
        return
    with load_programs_as("fp32"):
        here = case.run(case.portable(), case.schedules[0])
    yield Measurement("witness_agreement", relative_error(plain, here))


def witness_verdict(
    name: str, engine: Mapping[str, str], runtime: Mapping[str, str], measurements: Iterable[Measurement | NotRun]
) -> dict[str, Any]:
    """Return what witness/P.json contains.

    Args:
        name: the part's.
        engine: the engine of this machine.
        runtime: the Core AI runtime.
        measurements: the measurements.
    """
    answers = list(measurements)
    gate = compare(one for one in answers if isinstance(one, Measurement))
    not_run = {one.name: one.reason for one in answers if isinstance(one, NotRun)}
    return {"part": name, "engine": dict(engine), "witness": dict(runtime), "gate": gate, "not_run": not_run}


def witness_case(
    part: Part, bundle: Path, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: PackageWeights
) -> WitnessCase:
    """Return the case of a part; the arguments are the same as for `witness_measurements`."""
    return (_encoder if part.spec.encodes else _decoder)(part, bundle, plan, known, source, stored)


def _decoder(
    part: Part, bundle: Path, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: PackageWeights
) -> WitnessCase:
    """Return the case of a part of a decoder, for the first tokens of the text."""
    reference = Reference(source, plan["context"], carried_channels(plan))
    first = {name: known[name][:TOKENS] for name in known if name == "rows"}  # of a second table
    case = part_case(part, reference, {**known, **first, "hidden": known["hidden"][:, :TOKENS]}, source, stored)
    # The caches only need to hold the text and the padding of its last pass, and empty slots cost time.
    short = part.changed(slots=TOKENS + part.spec.tokens) if PART_KINDS[part.kind].by_layer else part
    ways = {PLAIN: list(in_passes(case.count, [1]))} | part_schedules(part, case.count, plan["verify"])
    widths = (1, *compared_widths(plan["verify"], part.spec.tokens))

    def run(program: Any, name: str) -> Floats:
        here = part if isinstance(program, Program) else short
        runner = PartRunner(bundle, here, {**plan, "context": here.spec.slots})
        runner.loaded, runner.widths = (lambda: program), widths
        return runner.run(case.rows, ways[name])[0]

    return WitnessCase(case.expected(), tuple(ways), run, PartRunner(bundle, part, plan).loaded, short, widths)


def _encoder(
    part: Part, bundle: Path, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: PackageWeights
) -> WitnessCase:
    """Return the case of an encoder of one width: the first passage of the text that fits it."""
    reference, weights = EncoderReference(source, plan["task"]), checkpoint_weights(source, plan["prefix"])
    texts = passages(known["tokens"].tolist(), part.spec.tokens, plan["task"])[:1]
    count = sum(map(len, texts))
    edges = {name: rows if name == "output" else rows[:count] for name, rows in known_of(part, known).items()}
    case = encoder_case(part, plan, reference, texts, edges, stored, weights)

    def run(program: Any, name: str) -> Floats:
        runner = PartRunner(bundle, part, plan)
        runner.loaded = lambda: program
        return runner.run(case.rows, one_by_one(case.texts))[0]

    loaded, width = PartRunner(bundle, part, plan).loaded, f"T={part.spec.tokens}"
    return WitnessCase(case.expected(), (width,), run, loaded, part, (part.spec.tokens,))
