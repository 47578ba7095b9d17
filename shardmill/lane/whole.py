"""The measurements of all programs of a variant together, in one process, as a runtime loads them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardmill.lane.figures import relative_error
from shardmill.lane.job import Floats, Found, MeasurementJob, Refused, WrongError, meter, peak_bytes
from shardmill.lane.kit import Unit
from shardmill.lane.measurements import timed

SECONDS = 3.0  # measuring time for energy
EMPTY: Mapping[str, Floats] = {}
BURST, PAUSE = 20, 1.5  # passes of each width, and seconds between bursts: Core ML keeps inputs for about one second


def load_all(job: MeasurementJob, _: int) -> Found:
    """Load every program of the variant."""
    kinds = {unit.part["kind"] for unit in job.units.values()}
    if "experts" in kinds:
        raise Refused("a pass of a model with routed experts is chained by a runtime only; measure it by its programs")
    start = time.perf_counter()
    for unit in job.units.values():
        job.load_unit(unit)
    return Found(timing={"load_seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()})


def time_passes(job: MeasurementJob, width: int) -> Found:
    """Run whole passes of a width; return their likeliest tokens and the time of a pass."""
    chain = Chain(job, width)
    recorded = job.variant["recorded"][str(width)]
    chosen = [token for row in recorded for token in chain(row)]
    wanted = job.variant["tokens"].get(str(width))
    value: dict[str, Any] = {"programs": len(chain.units)}
    if wanted:
        value |= {"tokens": len(wanted), "agree": sum(a == b for a, b in zip(chosen, wanted, strict=True))}
    if chain.nonfinite:
        raise WrongError(f"{chain.nonfinite} passes gave numbers that are not finite", value)
    row = recorded[0]
    inputs = {unit.name: job.inputs(row[unit.part["name"]]) for unit in chain.units}
    timing = timed(lambda: chain.run(inputs), job.passes)
    return Found(value=value, timing={**timing, "peak_bytes": peak_bytes()})


def time_widths(job: MeasurementJob, width: int) -> Found:
    """Compare passes of a width with passes of one token, over the same recorded text.

    For each program, run with the same inputs, return the relative error as in the gates (width_error_fp16). For whole
    passes, return the tokens chosen alike, and the margin: how far the gap between the best two tokens moves. A guard
    that verifies close calls again at T = 1 must treat at least this gap as close.
    """
    one, wide = job.variant["recorded"]["1"], job.variant["recorded"][str(width)]
    errors = {}
    for unit in (unit for unit in job.units.values() if width in unit.program["widths"]):
        name = unit.part["name"]
        columns = _columns(job, unit, wide)
        single, many = _fed(Chain(job, 1), name, one, columns), _fed(Chain(job, width), name, wide)
        errors[name] = relative_error(many[: len(single)], single)
    value: dict[str, Any] = {"width_error_fp16": max(errors.values()), "programs_apart": errors}
    narrow, chained = _logits(Chain(job, 1), one), _logits(Chain(job, width), wide)
    count = min(len(narrow), len(chained))
    if count:
        value |= {"tokens": count, **_apart(narrow[:count], chained[:count])}
    return Found(value=value)


def _columns(job: MeasurementJob, unit: Unit, rows: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    """Return a part's recorded input from the residual stream, token by token: [1, channels, tokens, 1] by its name.

    A recording for another width differs in the last bits, which would make a difference in fp16.
    """
    name = unit.part["name"]
    return {_carried(unit): np.concatenate([job.array(row[name]["inputs"][_carried(unit)]) for row in rows], axis=2)}


def _carried(unit: Unit) -> str:
    """Return the name of the input that is the previous part's output."""
    return "hidden" if unit.part["kind"] == "head" else "x"


def _fed(chain: Chain, part: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Floats] = EMPTY) -> Floats:
    """Return a part's outputs [tokens, channels] for its recorded inputs.

    Args:
        chain: passes of a width.
        part: the part's name.
        rows: the recorded passes.
        columns: inputs [1, channels, tokens, 1] that replace recorded ones, for passes of one token; they also limit
            the
            number of passes.
    """
    unit = next(unit for unit in chain.units if unit.part["name"] == part)
    made = []
    for place, row in enumerate(rows[: min((array.shape[2] for array in columns.values()), default=len(rows))]):
        others = {name: array[:, :, place : place + 1] for name, array in columns.items()}
        made.append(chain.predict(unit, {**chain.job.inputs(row[part]), **others})[unit.part["output"]])
    return np.concatenate([np.asarray(out, np.float32)[0, :, :, 0].T for out in made])


def _logits(chain: Chain, rows: Sequence[Mapping[str, Any]]) -> Floats:
    """Return logits [tokens, V] of recorded passes; empty without an LM head."""
    found = [chain.logits(row).T for row in rows]
    return np.concatenate(found) if found and found[0].size else np.empty((0, 0), np.float32)


def _apart(narrow: Floats, wide: Floats) -> dict[str, Any]:
    """Count tokens chosen alike by logits [tokens, V] of two widths, and measure how far the best two's gap moves."""
    best = np.argsort(wide, axis=1)[:, -2:]
    gaps = [np.diff(np.take_along_axis(logits, best, axis=1), axis=1) for logits in (wide, narrow)]
    agree = int((narrow.argmax(axis=1) == wide.argmax(axis=1)).sum())
    return {"agree": agree, "margin": float(np.abs(gaps[0] - gaps[1]).max())}


def soak(job: MeasurementJob, _: int, kept: bool) -> Found:
    """Run passes of all widths with pauses in which Python works, for the requested time.

    Args:
        job: the child's work.
        kept: True if Python keeps the arrays of a pass, False if only Core ML owns them afterwards.
    """
    rows = job.variant["recorded"]
    chains = [(Chain if kept else Fresh)(job, int(width)) for width in rows]
    count, start = 0, time.monotonic()
    while time.monotonic() - start < job.soak:
        for chain in chains * BURST:
            if time.monotonic() - start < job.soak:
                chain.logits(rows[str(chain.width)][0])
                count += 1
        job.stage(f"passes, {count} of them so far")
        pause = time.monotonic() + PAUSE
        while time.monotonic() < pause:  # meanwhile Core ML releases the arrays, and Python uses its lock
            [bytearray(1 << 12) for _ in range(1000)]
    return Found(value={}, timing={"passes": count, "peak_bytes": peak_bytes()})


def energy(job: MeasurementJob, width: int) -> Found:
    """Measure the whole chip's millijoules for a pass of a width."""
    if not job.native:
        raise Refused("energy is read on a Mac only")
    chain = Chain(job, width)
    row = job.variant["recorded"][str(width)][0]
    inputs = {unit.name: job.inputs(row[unit.part["name"]]) for unit in chain.units}
    with meter() as millijoules:
        count, start, before = 0, time.perf_counter(), millijoules()
        while time.perf_counter() - start < SECONDS:
            chain.run(inputs)
            count += 1
        used = millijoules() - before
    if not used:  # no computation is free
        raise Refused(f"powermetrics reported no energy in {SECONDS:g} s: it failed, or its format is not known here")
    return Found(timing={"mj_per_pass": used / count, "passes": count})


class Chain:
    """The programs of a width in sequence; a part's output is the next part's input."""

    def __init__(self, job: MeasurementJob, width: int) -> None:
        """Load the programs with fresh states."""
        self.job, self.width, self.nonfinite = job, width, 0
        self.units = [unit for unit in job.units.values() if width in unit.program["widths"]]
        self.models = {unit.name: job.load_unit(unit) for unit in self.units}
        job.stage(f"passes at T={width}")
        self.states = {unit.name: self._state(unit) for unit in self.units}

    def logits(self, row: Mapping[str, Any]) -> Floats:
        """Return the logits [V, T] of a recorded pass; empty without an LM head."""
        return self.run({unit.name: self.job.inputs(row[unit.part["name"]]) for unit in self.units})

    def __call__(self, row: Mapping[str, Any]) -> list[int]:
        """Return the likeliest token after each token of a recorded pass; empty without an LM head."""
        logits = self.logits(row)
        return [int(token) for token in logits.argmax(axis=0)] if logits.size else []

    def run(self, inputs: Mapping[str, Mapping[str, Floats]]) -> Floats:
        """Return the logits [V, T] of a pass; `inputs` that another part's output provides are ignored."""
        hidden, logits = None, []
        for unit in self.units:
            given = dict(inputs[unit.name])
            if hidden is not None:
                given[_carried(unit)] = hidden
            made = self.predict(unit, given)[unit.part["output"]]
            out = np.asarray(made, np.float32)
            self.nonfinite += not np.isfinite(out).all()
            if unit.part["kind"] == "head":
                logits.append(out[0, :, :, 0])  # [V_j, T]
            elif unit.part["kind"] == "layers":
                hidden = out
        return np.concatenate(logits) if logits else np.empty((0, 0), np.float32)

    def predict(self, unit: Unit, given: Mapping[str, Floats]) -> Any:
        """Return the outputs of one program."""
        return self.job.predict(self.models[unit.name], given, self.states[unit.name])

    def _state(self, unit: Unit) -> Any:
        return self.models[unit.name].make_state() if unit.part["stateful"] else None


class Fresh(Chain):
    """A chain with new arrays for every pass, which only Core ML owns afterwards."""

    def predict(self, unit: Unit, given: Mapping[str, Floats]) -> Any:
        """Return the outputs of one program."""
        copies = {name: np.array(array, np.float32) for name, array in given.items()}
        return self.models[unit.name].predict(copies, state=self.states[unit.name])
