"""Names the operation and the layer at which numbers stopped being finite, if a measurement is not finite.

The measured passes are run again under observation, up to that operation. Nothing is run again for a finite
measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from portable_coreml import FirstNonFinite, NonFinite, trace
from portable_coreml.files.bundle import load_model
from portable_coreml.files.model import pick_function
from portable_coreml.program import Function
from portable_coreml.run.fp16_range import RangeAudit, RangeRow
from torch import Tensor

from shardmill.convert.normal import WEIGHT
from shardmill.gates.measurement import Measurement
from shardmill.gates.passes import in_passes
from shardmill.machine import is_portable
from shardmill.models.architecture import MASK, SLIDING_MASK
from shardmill.models.interface import BUNDLE
from shardmill.runtime.engine import Engine
from shardmill.runtime.program import Program, function_location

LAYER = re.compile(r"layer_(\d+)_")  # how the names of a layer's operations begin in a stamped program
MASKS = (MASK, SLIDING_MASK)


@dataclass(frozen=True)
class LayerRangeRow:
    """One operation of one program.

    Attributes:
        program: the program's name.
        layer: the layer that the operation belongs to; None in the LM head.
        first: index of the first token of the first pass in which the result left fp16; None if it never did.

    The other attributes are the attributes of RangeRow.
    """

    program: str
    layer: int | None
    kind: str
    output: str
    largest: float
    headroom: float
    overflows: int
    nans: int
    first: int | None

    @property
    def leaves(self) -> bool:
        """Return whether the result overflowed or turned NaN."""
        return bool(self.overflows or self.nans)


def audit_values(engine: Engine, tokens: Sequence[int]) -> list[LayerRangeRow]:
    """Return one row for each operation of every program, in the order of a pass, from passes of the widest width.

    A program with one function per width is run only at the widest width that the text fills, in its whole context.
    Remaining tokens are skipped: another function would run them, and its results have different names.
    """
    engine.reset()
    engine.fit(engine.slots)
    programs, width = engine.programs, max(engine.widths)
    steps = in_passes(len(tokens), [width])
    if any(program.functions for program in programs):
        width = max(each for each in engine.widths if each <= len(tokens))
        steps = in_passes(len(tokens) - len(tokens) % width, [width])
    functions = [_function(program, width) for program in programs]
    audits = [RangeAudit(function, MASKS) for function in functions]
    starts = []
    for program, seen in zip(programs, audits, strict=True):
        program.around = partial(trace, seen)
    try:
        for step in steps:
            starts.append(step.tokens[0])
            shared = copy(engine.host).arrays(step.positions, step.positions)  # the pass itself folds a recurrence
            for seen in audits:
                seen.begin({name: torch.from_numpy(shared[name]) for name in MASKS if name in shared})
            engine.forward([tokens[i] for i in step.tokens], step.positions, step.positions)
    finally:
        for program in programs:
            program.around = nullcontext
    rows: list[LayerRangeRow] = []
    for program, function, seen in zip(programs, functions, audits, strict=True):
        layers = layer_of(function)
        rows += [_row(program.name, layers.get(row.output), row, starts) for row in seen.rows()]
    return rows


def _function(program: Program, width: int) -> Function:
    """Return the function that runs passes of a width."""
    path, name = function_location(program.path, program.function(width))
    function, _ = pick_function(load_model(path), name)
    return function


def _row(program: str, layer: int | None, row: RangeRow, starts: Sequence[int]) -> LayerRangeRow:
    content = asdict(row)
    content["first"] = None if row.first is None else starts[row.first]
    return LayerRangeRow(program=program, layer=layer, **content)


def layer_of(function: Function) -> dict[str, int]:
    """Map the output of each operation to its layer, which the names of a stamped program's operations tell.

    In other programs it is the layer of the last weight used before an operation. Operations between the addition that
    ends one layer and the first weight of the next belong to the next.
    """
    layers: dict[str, int] = {}
    current: int | None = None
    waiting: list[str] = []  # since the last addition
    for op in function.block.walk():
        names = [b for bindings in op.inputs.values() for b in bindings if isinstance(b, str)]
        used = [int(match.group(1)) for name in names if (match := WEIGHT.match(name))]
        outputs = [out.name for out in op.outputs]
        if used and used[0] != current:
            current = used[0]
            layers.update(dict.fromkeys(waiting, current))
        waiting = [] if used or op.kind == "add" else [*waiting, *outputs]
        if current is not None:
            layers.update(dict.fromkeys(outputs, current))
    every = (out.name for op in function.block.walk() for out in op.outputs)
    return layers | {name: int(match.group(1)) for name in every if (match := LAYER.match(name))}


def worst(rows: Iterable[LayerRangeRow]) -> list[LayerRangeRow]:
    """Sort rows by how near they are to leaving fp16: NaN first, then overflows, then by headroom."""
    return sorted(rows, key=lambda row: (not row.nans, not row.overflows, row.headroom))


def ranges_by_layer(rows: Iterable[LayerRangeRow]) -> list[LayerRangeRow]:
    """Return the worst row of each layer, and of each program's operations outside layers, in the order of a pass."""
    groups: dict[tuple[str, int | None], list[LayerRangeRow]] = {}
    for row in rows:
        groups.setdefault((row.program, row.layer), []).append(row)
    return [worst(group)[0] for group in groups.values()]


def first_to_leave(rows: Sequence[LayerRangeRow]) -> LayerRangeRow | None:
    """Return the operation that left fp16 first: the first such operation of the earliest such pass."""
    left = [row for row in rows if row.first is not None]
    return min(left, key=lambda row: (row.first, rows.index(row)), default=None)


def as_json(rows: Iterable[LayerRangeRow]) -> list[Mapping[str, Any]]:
    """Return rows as plain data."""
    return [asdict(row) for row in rows]


Rerun = Callable[[], object]


class _Found(Exception):
    """Ends a run at its first result that is not finite."""

    def __init__(self, result: NonFinite, program: Path) -> None:
        super().__init__(result.name)
        self.result, self.program = result, program


def explained(measurement: Measurement, rerun: Rerun, where: Path | Engine) -> Measurement:
    """Return the measurement; if it is not finite, its detail names the first operation with a non-finite result.

    Args:
        measurement: the gate's measurement.
        rerun: runs the same passes again, in the same precision.
        where: the one program that `rerun` runs, or the engine whose programs it runs.
    """
    if math.isfinite(measurement.value) or not is_portable():
        return measurement
    try:
        if isinstance(where, Path):
            with trace(_observer(where)):
                rerun()
        else:
            _rerun_engine(where, rerun)
        said = "every operation's results are finite"
    except _Found as error:
        said = f"first non-finite: {_described(error.result, error.program)}"
    return replace(measurement, detail="; ".join(filter(None, (measurement.detail, said))))


def _observer(program: Path) -> Callable[[str, str, Tensor], None]:
    first = FirstNonFinite()

    def look(name: str, kind: str, value: Tensor) -> None:
        first(name, kind, value)
        if first.found is not None:
            raise _Found(first.found, program)

    return look


def _rerun_engine(engine: Engine, rerun: Rerun) -> None:
    """Run with every program observed, from new states: 0 * NaN is NaN, so a masked NaN would spoil a pass."""
    programs = engine.programs
    for program in programs:
        program.renew()
        program.around = partial(trace, _observer(program.path))
    try:
        rerun()
    finally:
        for program in programs:
            program.around = nullcontext


def _described(result: NonFinite, program: Path) -> str:
    layers: dict[str, int] = {}
    for bundle in sorted(program.glob(f"*{BUNDLE}")) or [program]:
        for function in load_model(bundle).program.functions.values():
            layers |= layer_of(function)
    layer = layers.get(result.name)
    place = f"{program.stem}, outside layers" if layer is None else f"layer {layer}"
    return f"{result.kind} output {result.name} ({place})"
