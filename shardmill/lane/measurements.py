"""The measurements of one program."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from shardmill.lane.cut import ONLY, link, with_default_tokens, with_one_function
from shardmill.lane.figures import psnr
from shardmill.lane.job import Floats, Found, MeasurementJob, Refused, WrongError, peak_bytes
from shardmill.lane.kit import PORTABLE
from shardmill.lane.todo import planned

WARM = 3  # passes before the measured ones


def compile_program(job: MeasurementJob, _: int) -> Found:
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
    return Found(timing={"compile_seconds": time.perf_counter() - start})


def load_unit(job: MeasurementJob, _: int, way: str = "") -> Found:
    """Load the program in a new process, and run a first pass of every width, which specialises it.

    In a second process the system already knows the program.
    """
    return Found(timing=load_and_run(job, job.bundle(job.unit), job.unit.called, way))


def load_portable(job: MeasurementJob, _: int) -> Found:
    """Load the bundle that the portable compiler produced, and compare a pass of each width."""
    unit, target = job.unit, job.work / PORTABLE / job.unit.variant / f"{job.unit.name}.mlmodelc"
    job.stage("assembly of the bundle")
    shutil.rmtree(target, ignore_errors=True)
    for name, source in unit.program["bundle"].items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        link(str(job.kit.folder / source), str(target / name))
    timing = load_and_run(job, target, unit.called, PORTABLE)
    worst = []
    for width in unit.program["widths"]:
        for row in job.recorded(width, unit.part["name"])[:1]:
            out = caller(job, width, PORTABLE)(job.inputs(row))
            worst.append(psnr(out[:, :: row["stride"]], job.array(row["fp32"])))
    return Found(value={"psnr": min(worst)} if worst else {}, timing=timing)


def load_and_run(job: MeasurementJob, bundle: Path, function: str | None, way: str = "") -> dict[str, Any]:
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
        job.predict(model, inputs, _state(job, model))
        timing[f"first_pass_seconds.T={width}"] = time.perf_counter() - start
    job.loaded[job.unit.name, way] = model
    return timing | {"peak_bytes": peak_bytes()}


def parity(job: MeasurementJob, width: int) -> Found:
    """Compare every recorded pass of a width with the portable engine's outputs in fp32 and with fp16 rounding."""
    rows, runner = _rows(job, width), caller(job, width)
    exact, shipped, found = [], [], []
    for row in rows:
        out = runner(job.inputs(row))
        if not np.isfinite(out).all():
            bad = int((~np.isfinite(out)).sum())
            raise WrongError(f"{bad} of {out.size} numbers are not finite", {"nonfinite": bad})
        found.append(out[:, :: row["stride"]].ravel())
        exact.append(job.array(row["fp32"]).ravel())
        shipped.append(job.array(row["fp16"]).ravel())
    got, fp32, fp16 = (np.concatenate(each) for each in (found, exact, shipped))
    value = {"psnr": psnr(got, fp32), "psnr_expected": psnr(fp16, fp32), "psnr_emulated": psnr(got, fp16)}
    limit = job.kit.content["limits"]["psnr"]
    if not value["psnr"] >= limit:  # NaN fails too
        raise WrongError(f"psnr is {value['psnr']:.2f} dB against fp32, must be at least {limit:g}", value)
    return Found(value=value | {"passes": len(rows)})


def speed(job: MeasurementJob, width: int, way: str = "") -> Found:
    """Time a pass of a width in this program alone."""
    row, runner = _rows(job, width)[0], caller(job, width, way)
    inputs = job.inputs(row)
    return Found(timing={**timed(lambda: runner(inputs), job.passes), "peak_bytes": peak_bytes()})


def switch(job: MeasurementJob, _: int, way: str = "") -> Found:
    """Time a pass of each width in turn, so that the shape changes with every pass."""
    widths = job.unit.program["widths"]
    inputs = [job.inputs(_rows(job, width)[0]) for width in widths]
    runner = caller(job, max(widths), way)
    return Found(timing=timed(lambda: [runner(each) for each in inputs], job.passes))


def residency(job: MeasurementJob, width: int) -> Found:
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
    return Found(value={"evidence": evidence, "counts": counts, "rows": rows}, timing=timing)


def timed(call: Callable[[], Any], passes: int) -> dict[str, Any]:
    """Return the median and the least milliseconds of a call."""
    for _ in range(WARM):
        call()
    taken = []
    for _ in range(passes):
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return {"ms": median(taken), "ms_least": min(taken), "passes": passes}


def caller(job: MeasurementJob, width: int, way: str = "") -> Callable[[dict[str, Floats]], Floats]:
    """Return the loaded program with fresh states, as a function of its inputs."""
    model = job.load_unit(job.unit, way)
    job.stage(f"passes at T={width}")
    state, output = _state(job, model), job.unit.part["output"]
    return lambda inputs: np.asarray(job.predict(model, inputs, state)[output], np.float32)


def _state(job: MeasurementJob, model: Any) -> Any:
    return model.make_state() if job.unit.part["stateful"] else None


def _rows(job: MeasurementJob, width: int) -> list[Any]:
    rows = job.recorded(width, job.unit.part["name"])
    if not rows:
        raise Refused("no recorded pass of this width calls the program")
    return rows
