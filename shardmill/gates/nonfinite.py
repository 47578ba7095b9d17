"""Names the operation and the layer at which numbers stopped being finite, if a measurement is not finite.

The measured passes are run again under observation, up to that operation. Nothing is run again for a finite
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from portable_coreml import FirstNonFinite, NonFinite, trace
from portable_coreml.files.load import load_model
from torch import Tensor

from shardmill.gates.fp16_range import layer_of
from shardmill.gates.measurement import Measurement
from shardmill.machine import is_portable
from shardmill.models.calls import BUNDLE
from shardmill.runtime.engine import Engine

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
    except _Found as found:
        said = f"first non-finite: {_described(found.result, found.program)}"
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
