"""What is measured of all programs of a variant together, in one process, as a runtime holds them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardmill.lane.energy import meter
from shardmill.lane.job import Floats, Found, Job, Refused, WrongError, peak_bytes
from shardmill.lane.kit import Unit
from shardmill.lane.measurements import timed

SECONDS = 3.0  # that energy is counted over


def load_all(job: Job, _: int) -> Found:
    """Loads every program of the variant."""
    kinds = {unit.part["kind"] for unit in job.units.values()}
    if "experts" in kinds:
        raise Refused("a pass of a model with routed experts is chained by a runtime only; measure it by its programs")
    start = time.perf_counter()
    for unit in job.units.values():
        job.stage(f"load of {unit.name}")
        job.loaded[unit.name] = job.load_unit(unit)
    return Found(timing={"load_seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()})


def passes(job: Job, width: int) -> Found:
    """Whole passes of a width: the tokens that they would choose, and what a pass takes."""
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


def energy(job: Job, width: int) -> Found:
    """Millijoules of the whole chip for a pass of a width."""
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
    if not used:  # no chip runs on nothing
        raise Refused(f"powermetrics told of no energy in {SECONDS:g} s: it failed, or writes what can't be read here")
    return Found(timing={"mj_per_pass": used / count, "passes": count})


class Chain:
    """The programs of a width, one after the other: what a part gives is the next one's input."""

    def __init__(self, job: Job, width: int) -> None:
        """With fresh states."""
        self.job, self.nonfinite = job, 0
        self.units = [unit for unit in job.units.values() if width in unit.program["widths"]]
        for unit in self.units:
            if unit.name not in job.loaded:
                job.stage(f"load of {unit.name}")
                job.loaded[unit.name] = job.load_unit(unit)
        job.stage(f"passes at T={width}")
        self.states = {unit.name: self._state(unit) for unit in self.units}

    def __call__(self, row: Mapping[str, Any]) -> list[int]:
        """The likeliest token after each token of a recorded pass; none without an LM head."""
        logits = self.run({unit.name: self.job.inputs(row[unit.part["name"]]) for unit in self.units})
        return [int(token) for token in logits.argmax(axis=0)] if logits.size else []

    def run(self, inputs: Mapping[str, Mapping[str, Floats]]) -> Floats:
        """Logits [V, T] of a pass; of later parts only those inputs are taken that no program makes."""
        hidden, logits = None, []
        for unit in self.units:
            given = dict(inputs[unit.name])
            carried = "hidden" if unit.part["kind"] == "head" else "x"
            if hidden is not None:
                given[carried] = hidden
            made = self.job.loaded[unit.name].predict(given, state=self.states[unit.name])[unit.part["output"]]
            out = np.asarray(made, np.float32)
            self.nonfinite += not np.isfinite(out).all()
            if unit.part["kind"] == "head":
                logits.append(out[0, :, :, 0])  # [V_j, T]
            elif unit.part["kind"] == "layers":
                hidden = out
        return np.concatenate(logits) if logits else np.empty((0, 0), np.float32)

    def _state(self, unit: Unit) -> Any:
        return self.job.loaded[unit.name].make_state() if unit.part["stateful"] else None
