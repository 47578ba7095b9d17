"""The measurements: first of one program, then of all programs of a variant, loaded together as a runtime does."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kit_runner.compute_plan import planned
from kit_runner.figures import psnr, relative_error
from kit_runner.job import Floats, Measured, MeasurementJob, Refused, WrongError, meter, peak_bytes, timed
from kit_runner.kit import CPU, PORTABLE, UNHINTED, Unit
from kit_runner.packages import ONLY, cut_after, link, operations, with_default_tokens, with_one_function
from kit_runner.probes import probe

SECONDS = 3.0  # measuring time for energy
BURST, PAUSE = 20, 1.5  # passes of each width, and seconds between bursts: Core ML keeps inputs for about one second


def _compile_program(job: MeasurementJob, _: int) -> Measured:
    """Compile the package for this system."""
    import coremltools as ct

    target = job.bundle(job.unit)
    job.stage("compilation")
    start = time.perf_counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        package = job.package(job.unit)
        if job.unit.program.get("alone"):
            package = Path(folder) / package.name
            with_one_function(job.package(job.unit), package, job.unit.program["function"])
        made = ct.models.utils.compile_model(str(package), str(Path(folder) / target.name))
        shutil.rmtree(target, ignore_errors=True)
        Path(made).rename(target)
    return Measured(timing={"compile_seconds": time.perf_counter() - start})


def _load_unit(job: MeasurementJob, _: int, way: str = "") -> Measured:
    """Load the program in a new process, and run a first pass of every width, which specialises it.

    In a second process the system already knows the program.
    """
    return Measured(timing=_load_and_run(job, job.bundle(job.unit), job.unit.called, way))


def _load_portable(job: MeasurementJob, _: int) -> Measured:
    """Load the bundle that the portable compiler produced, and compare a pass of each width."""
    unit, target = job.unit, job.work / PORTABLE / job.unit.variant / f"{job.unit.name}.mlmodelc"
    job.stage("assembly of the bundle")
    shutil.rmtree(target, ignore_errors=True)
    for name, source in unit.program["bundle"].items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        link(str(job.kit.folder / source), str(target / name))
    timing = _load_and_run(job, target, unit.called, PORTABLE)
    worst = []
    for width in unit.program["widths"]:
        for row in job.recorded(width, unit.part["name"])[:1]:
            out = _caller(job, width, PORTABLE)(job.inputs(row))
            worst.append(psnr(out[:, :: row["stride"]], job.array(row["fp32"])))
    return Measured(value={"psnr": min(worst)} if worst else {}, timing=timing)


def _load_and_run(job: MeasurementJob, bundle: Path, function: str | None, way: str = "") -> dict[str, Any]:
    """Load a function of a bundle and run it once at every width of the program; return the seconds of each step."""
    job.stage("load")
    start = time.perf_counter()
    model = job.load(bundle, job.unit, function, way)
    timing: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
    for width in job.unit.program["widths"]:
        rows = job.recorded(width, job.unit.part["name"])
        if not rows:
            continue
        job.stage(f"first pass at T={width}")
        inputs = job.inputs(rows[0])
        start = time.perf_counter()
        job.predict(model, inputs, _state(model, job.unit))
        timing[f"first_pass_seconds.T={width}"] = time.perf_counter() - start
    job.loaded[job.unit.name, way] = model
    return timing | {"peak_bytes": peak_bytes()}


def parity(job: MeasurementJob, width: int) -> Measured:
    """Compare every recorded pass of a width with the portable engine's outputs in fp32 and with fp16 rounding."""
    rows, runner = _rows(job, width), _caller(job, width)
    exact, shipped, outputs = [], [], []
    for row in rows:
        out = runner(job.inputs(row))
        if not np.isfinite(out).all():
            bad = int((~np.isfinite(out)).sum())
            raise WrongError(f"{bad} of {out.size} numbers are not finite", {"nonfinite": bad})
        outputs.append(out[:, :: row["stride"]].ravel())
        exact.append(job.array(row["fp32"]).ravel())
        shipped.append(job.array(row["fp16"]).ravel())
    got, fp32, fp16 = (np.concatenate(each) for each in (outputs, exact, shipped))
    value = {"psnr": psnr(got, fp32), "psnr_expected": psnr(fp16, fp32), "psnr_emulated": psnr(got, fp16)}
    limit = job.kit.content["limits"]["psnr"]
    if not value["psnr"] >= limit:  # NaN fails too
        raise WrongError(f"psnr is {value['psnr']:.2f} dB against fp32, must be at least {limit:g}", value)
    return Measured(value=value | {"passes": len(rows)})


def check(job: MeasurementJob, name: str) -> Measured:
    """Feed what `shardmill check` feeds in a way of this name, and compare with the results that the build carries."""
    ways = job.variant["checks"][job.unit.part["name"]]
    way = next(each for each in ways if each["way"].replace(" ", "-") == name)
    columns, outputs = job.array(way["columns"]).astype(np.int64), []
    runner = _caller(job, way["passes"][0]["width"])
    for one in way["passes"]:
        outputs.append(runner(job.inputs(one))[0, :, one["rows"], 0])
    error = relative_error(np.take_along_axis(np.concatenate(outputs), columns, axis=1), job.array(way["expected"]))
    value = {"relative_error": error, "limit": way["limit"]}
    if not error <= way["limit"]:  # NaN fails too
        raise WrongError(
            f"{error:.2g} of the result away at {way['way']}, at most {way['limit']:.2g} is allowed", value
        )
    return Measured(value=value)


def _speed(job: MeasurementJob, width: int, way: str = "") -> Measured:
    """Time a pass of a width in this program alone."""
    row, runner = _rows(job, width)[0], _caller(job, width, way)
    inputs = job.inputs(row)
    return Measured(timing={**timed(lambda: runner(inputs), job.passes), "peak_bytes": peak_bytes()})


def _switch(job: MeasurementJob, _: int, way: str = "") -> Measured:
    """Time a pass of each width in turn, so that the shape changes with every pass."""
    widths = job.unit.program["widths"]
    inputs = [job.inputs(_rows(job, width)[0]) for width in widths]
    runner = _caller(job, max(widths), way)
    return Measured(timing=timed(lambda: [runner(each) for each in inputs], job.passes))


def _residency(job: MeasurementJob, width: int) -> Measured:
    """Return the device that Core ML's plan prefers for each operation.

    A plan describes the default shape of the default function only, so other shapes and functions need a copy.
    """
    import coremltools as ct

    job.stage("compute plan")
    evidence = "measured" if job.native else "predicted"
    with tempfile.TemporaryDirectory() as folder:
        bundle, copy = job.bundle(job.unit), Path(folder) / "copy.mlpackage"
        function, flexible = job.unit.program["function"], not job.unit.program["fixed"]
        named = {ONLY: function} if function else {}
        if flexible:
            with_default_tokens(job.package(job.unit), copy, width)
        elif function:
            with_one_function(job.package(job.unit), copy, function)
        if copy.exists():
            bundle = Path(ct.models.utils.compile_model(str(copy), str(Path(folder) / "copy.mlmodelc")))
        before, start = peak_bytes(), time.perf_counter()
        rows = [{**row, "function": named.get(row["function"], row["function"])} for row in planned(bundle)]
    timing = {"plan_seconds": time.perf_counter() - start, "peak_bytes": peak_bytes(), "peak_bytes_before": before}
    counts = dict(sorted(Counter(row["status"] for row in rows).items()))
    return Measured(value={"evidence": evidence, "counts": counts, "rows": rows}, timing=timing)


def _caller(job: MeasurementJob, width: int, way: str = "") -> Callable[[dict[str, Floats]], Floats]:
    """Return the loaded program with fresh states, as a function of its inputs."""
    model = job.load_unit(job.unit, way)
    job.stage(f"passes at T={width}")
    state, output = _state(model, job.unit), job.unit.part["output"]
    return lambda inputs: np.asarray(job.predict(model, inputs, state)[output], np.float32)


def _state(model: Any, unit: Unit) -> Any:
    return model.make_state() if unit.part["stateful"] else None


def _rows(job: MeasurementJob, width: int) -> list[Any]:
    rows = job.recorded(width, job.unit.part["name"])
    if not rows:
        raise Refused("no recorded pass of this width calls the program")
    return rows


def _cut_and_load(job: MeasurementJob, place: int) -> Measured:
    """Load and run the program, cut after the operation at `place`."""
    import coremltools as ct

    with tempfile.TemporaryDirectory() as folder:
        job.stage(f"cut after operation {place}")
        package = Path(folder) / "cut.mlpackage"
        cut_after(job.package(job.unit), package, place, job.unit.program["function"])
        job.stage("compilation of the cut program")
        bundle = Path(ct.models.utils.compile_model(str(package), str(Path(folder) / "cut.mlmodelc")))
        timing = _load_and_run(job, bundle, None)
    kind, output = operations(job.package(job.unit), job.unit.program["function"])[place]
    return Measured(value={"operation": kind, "output": output}, timing=timing)


def _list_operations(job: MeasurementJob, _: int) -> Measured:
    """Return type and first output of each operation; the searching process loads nothing, not even coremltools."""
    pairs = operations(job.package(job.unit), job.unit.program["function"])
    return Measured(value={"operations": [list(pair) for pair in pairs]})


def _load_all(job: MeasurementJob, _: int) -> Measured:
    """Load every program of the variant."""
    if "experts" in {unit.part["kind"] for unit in job.units.values()}:
        raise Refused("a pass of a model with routed experts is chained by a runtime only; measure it by its programs")
    start = time.perf_counter()
    for unit in job.units.values():
        job.load_unit(unit)
    return Measured(timing={"load_seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()})


def _time_passes(job: MeasurementJob, width: int) -> Measured:
    """Run whole passes of a width; return their likeliest tokens and the time of a pass."""
    chain, rows = Chain(job, width), job.variant["recorded"][str(width)]
    logits = _logits(chain, rows)
    value: dict[str, Any] = {"programs": len(chain.in_pass)}
    if wanted := job.variant["tokens"].get(str(width)):
        chosen = logits.argmax(axis=1).tolist() if logits.size else []
        value |= {"tokens": len(wanted), "agree": sum(a == b for a, b in zip(chosen, wanted, strict=True))}
    if chain.nonfinite:
        raise WrongError(f"{chain.nonfinite} passes gave numbers that are not finite", value)
    inputs = chain.inputs(rows[0])
    timing = timed(lambda: chain.run(inputs), job.passes)
    return Measured(value=value, timing={**timing, "peak_bytes": peak_bytes()})


def _time_widths(job: MeasurementJob, width: int) -> Measured:
    """Compare passes of a width with passes of one token, over the same recorded text.

    For each program, run with the same inputs, return the relative error as in the gates (width_error_fp16). For whole
    passes, return the tokens chosen alike, and the margin: how far the gap between the best two tokens moves. A guard
    that verifies close calls again at T = 1 must treat at least this gap as close.
    """
    one, wide = job.variant["recorded"]["1"], job.variant["recorded"][str(width)]
    errors = {}
    for unit in job.called(width):
        name, carried = unit.part["name"], _carried(unit)
        # A recording for another width differs in the last bits, which would make a difference in fp16.
        stream = np.concatenate([job.array(row[name]["inputs"][carried]) for row in wide], axis=2)
        single, many = _outputs(Chain(job, 1), name, one, stream), _outputs(Chain(job, width), name, wide)
        errors[name] = relative_error(many[: len(single)], single)
    value: dict[str, Any] = {"width_error_fp16": max(errors.values()), "programs_apart": errors}
    narrow, chained = _logits(Chain(job, 1), one), _logits(Chain(job, width), wide)
    count = min(len(narrow), len(chained))
    if count:
        value |= {"tokens": count, **count_alike(narrow[:count], chained[:count])}
    return Measured(value=value)


def _carried(unit: Unit) -> str:
    """Return the name of the input that is the previous part's output."""
    return "hidden" if unit.part["kind"] in ("head", "labels") else "x"


def _outputs(chain: Chain, part: str, rows: Sequence[Mapping[str, Any]], stream: Floats | None = None) -> Floats:
    """Return a part's outputs [tokens, channels] for its recorded inputs.

    Args:
        chain: passes of a width.
        part: the part's name.
        rows: the recorded passes.
        stream: input [1, channels, tokens, 1] in place of the recorded previous outputs, for passes of one token; it
            also limits the number of passes.
    """
    unit = next(unit for unit in chain.units if unit.part["name"] == part)
    made = []
    for place, row in enumerate(rows if stream is None else rows[: stream.shape[2]]):
        inputs = chain.job.inputs(row[part])
        if stream is not None:
            inputs[_carried(unit)] = stream[:, :, place : place + 1]
        made.append(np.asarray(chain.predict(unit, inputs)[unit.part["output"]], np.float32)[0, :, :, 0].T)
    return np.concatenate(made)


def _logits(chain: Chain, rows: Sequence[Mapping[str, Any]]) -> Floats:
    """Return logits [tokens, V] of recorded passes; empty without an LM head."""
    logits = [chain.run(chain.inputs(row)).T for row in rows]
    return np.concatenate(logits) if logits and logits[0].size else np.empty((0, 0), np.float32)


def count_alike(narrow: Floats, wide: Floats) -> dict[str, Any]:
    """Count tokens chosen alike by logits [tokens, V] of two widths, and measure how far the best two's gap moves."""
    best = np.argsort(wide, axis=1)[:, -2:]
    gaps = [np.diff(np.take_along_axis(logits, best, axis=1), axis=1) for logits in (wide, narrow)]
    agree = int((narrow.argmax(axis=1) == wide.argmax(axis=1)).sum())
    return {"agree": agree, "margin": float(np.abs(gaps[0] - gaps[1]).max())}


def _soak(job: MeasurementJob, _: int, keeps: bool) -> Measured:
    """Run passes of all widths with pauses in which Python works, for the requested time.

    Args:
        job: the child's work.
        keeps: True if Python keeps the arrays of a pass, False if only Core ML owns them afterwards.
    """
    rows = job.variant["recorded"]
    chains = [Chain(job, int(width), keeps) for width in rows]
    count, start = 0, time.monotonic()
    while time.monotonic() - start < job.soak:
        for chain in chains * BURST:
            if time.monotonic() - start < job.soak:
                chain.run(chain.inputs(rows[str(chain.width)][0]))
                count += 1
        job.stage(f"passes, {count} of them so far")
        pause = time.monotonic() + PAUSE
        while time.monotonic() < pause:  # meanwhile Core ML releases the arrays, and Python uses its lock
            [bytearray(1 << 12) for _ in range(1000)]
    return Measured(timing={"passes": count, "peak_bytes": peak_bytes()})


def energy(job: MeasurementJob, width: int) -> Measured:
    """Measure the whole chip's millijoules for a pass of a width."""
    if not job.native:
        raise Refused("energy is read on a Mac only")
    chain = Chain(job, width)
    inputs = chain.inputs(job.variant["recorded"][str(width)][0])
    with meter() as millijoules:
        count, start, before = 0, time.perf_counter(), millijoules()
        while time.perf_counter() - start < SECONDS:
            chain.run(inputs)
            count += 1
        used = millijoules() - before
    if not used:  # no computation is free
        raise Refused(f"powermetrics reported no energy in {SECONDS:g} s: it failed, or its format is not known here")
    return Measured(timing={"mj_per_pass": used / count, "passes": count})


class Chain:
    """The programs of a width in sequence; a part's output is the next part's input."""

    def __init__(self, job: MeasurementJob, width: int, keeps: bool = True) -> None:
        """Load the programs with fresh states.

        Args:
            job: the child's work.
            width: tokens of a pass.
            keeps: False for new arrays in every pass, which only Core ML owns afterwards.
        """
        self.job, self.width, self.kept, self.nonfinite = job, width, keeps, 0
        self.units = job.called(width)
        self.in_pass = [unit for unit in self.units if unit.part["kind"] != "labels"]  # a pass runs the whole head
        self.models = {unit.name: job.load_unit(unit) for unit in self.units}
        job.stage(f"passes at T={width}")
        self.states = {unit.name: _state(self.models[unit.name], unit) for unit in self.units}

    def inputs(self, row: Mapping[str, Any]) -> dict[str, dict[str, Floats]]:
        """Return every program's inputs of a recorded pass."""
        return {unit.name: self.job.inputs(row[unit.part["name"]]) for unit in self.units}

    def run(self, inputs: Mapping[str, Mapping[str, Floats]]) -> Floats:
        """Return the logits [V, T] of a pass, empty without an LM head.

        An input that another part's output provides is ignored.
        """
        hidden, logits = None, []
        for unit in self.in_pass:
            arrays = dict(inputs[unit.name])
            if hidden is not None:
                arrays[_carried(unit)] = hidden
            out = np.asarray(self.predict(unit, arrays)[unit.part["output"]], np.float32)
            self.nonfinite += not np.isfinite(out).all()
            if unit.part["kind"] == "head":
                logits.append(out[0, :, :, 0])  # [V_j, T]
            elif unit.part["kind"] in ("layers", "encoder"):
                hidden = out
        return np.concatenate(logits) if logits else np.empty((0, 0), np.float32)

    def predict(self, unit: Unit, arrays: Mapping[str, Floats]) -> Any:
        """Return the outputs of one program."""
        model, state = self.models[unit.name], self.states[unit.name]
        if self.kept:
            return self.job.predict(model, arrays, state)
        return model.predict({name: np.array(array, np.float32) for name, array in arrays.items()}, state=state)


MEASURES: dict[str, Callable[[MeasurementJob, int], Measured]] = {
    "compile": _compile_program,
    "load.first": _load_unit,
    "load.warm": _load_unit,
    "load.portable": _load_portable,
    "parity": parity,
    "speed": _speed,
    "switch": _switch,
    **{f"load.{way}": partial(_load_unit, way=way) for way in (UNHINTED, CPU)},
    **{f"speed.{way}": partial(_speed, way=way) for way in (UNHINTED, CPU)},
    f"switch.{UNHINTED}": partial(_switch, way=UNHINTED),
    "residency": _residency,
    "probe": probe,
    "bisect": _cut_and_load,
    "bisect.operations": _list_operations,
    "load.whole": _load_all,
    "pass": _time_passes,
    "widths": _time_widths,
    "energy": energy,
    "soak.kept": partial(_soak, keeps=True),
    "soak.fresh": partial(_soak, keeps=False),
}
