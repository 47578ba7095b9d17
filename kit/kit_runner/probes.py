"""Small programs that answer a question about a system: each is built here, run, and compared with numpy.

A kit would be gigabytes large if it held programs of 1 and 2 GiB. So it holds their sizes, and coremltools builds them
on the machine that is asked. Their weights and inputs come from a seed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kit_runner.compute_plan import planned
from kit_runner.figures import relative_error
from kit_runner.job import Floats, Measured, MeasurementJob, Refused, WrongError, peak_bytes, timed

WIDTH = 4096  # channels of the programs that are only large
HEAD = 64  # channels of an attention head
ERROR = 0.05  # of the result: fp16 rounds each number to 0.0005, while a wrong number is off by its own size
COPIES = 4  # of its weights, in memory while a program is built and on disk while it is compiled


@dataclass(frozen=True)
class Made:
    """A program of mb, its inputs, and what it shall return.

    Attributes:
        function: takes mb's values and returns the output.
        inputs: by name.
        expected: the output in fp32.
        axis: of the output, along which a row of numbers lies.
    flexible: the most tokens (axis 2) of a range of shapes; 0 for fixed shapes.
    """

    function: Callable[..., Any]
    inputs: Mapping[str, Floats]
    expected: Floats
    axis: int = 1
    flexible: int = 0


def probe(job: MeasurementJob, place: int) -> Measured:
    """Return where a program's operations are placed and how far its output is from numpy's; time a pass.

    Raises:
        WrongError: the output is not numpy's.
        Refused: the machine has too little memory or disk to build the program.
    """
    import coremltools as ct

    asked = job.question["probes"][place]
    check_room(int(asked.get("bytes", 0)), job.work)
    job.stage("the program is built")
    made = MAKERS[asked["kind"]](asked)
    with tempfile.TemporaryDirectory(dir=job.work) as folder:
        package = Path(folder) / "probe.mlpackage"
        _converted(made).save(str(package))
        job.stage("compilation")
        bundle = ct.models.utils.compile_model(str(package), str(Path(folder) / "probe.mlmodelc"))
        shutil.rmtree(package)
        job.stage("compute plan")
        rows = [row for row in planned(Path(bundle)) if row["status"] != "no_device"]
        job.stage("load")
        start = time.perf_counter()
        model = ct.models.CompiledMLModel(str(bundle), compute_units=ct.ComputeUnit.CPU_AND_NE)
        loading = time.perf_counter() - start
        job.stage("passes")
        output = np.asarray(job.predict(model, made.inputs, None)["y"], np.float32)
        timing = {"load_seconds": loading, **timed(lambda: job.predict(model, made.inputs, None), job.passes)}
        if asked.get("beside_cpu"):  # a plan may name the Neural Engine for what runs on the CPU
            job.stage("passes on the CPU")
            model = ct.models.CompiledMLModel(str(bundle), compute_units=ct.ComputeUnit.CPU_ONLY)
            timing["ms_cpu"] = timed(lambda: job.predict(model, made.inputs, None), job.passes)["ms"]
    value = {
        "evidence": "measured" if job.native else "predicted",
        "placed": sum(row["status"] == "ane" for row in rows),
        "of": len(rows),
        "error": relative_error(*(np.moveaxis(each, made.axis, -1) for each in (output, made.expected))),
    }
    if not value["error"] <= ERROR:  # NaN fails too
        raise WrongError(f"the output is off by {value['error']:.3g} of its size", value)
    return Measured(value=value, timing={**timing, "peak_bytes": peak_bytes()})


def check_room(size: int, folder: Path) -> None:
    """Raise Refused if a program with `size` bytes of weights can't be built here."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    folder.mkdir(parents=True, exist_ok=True)
    for name, available in (("memory", memory), ("free disk", shutil.disk_usage(folder).free)):
        if available < COPIES * size:
            raise Refused(f"takes {COPIES * size / 2**30:.0f} GiB of {name}; there are {available / 2**30:.0f}")


def _converted(made: Made) -> Any:
    """Return the mlpackage of a program, whose numbers are fp16."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, get_new_symbol, types

    def shape(array: Floats, tokens: Any) -> tuple[Any, ...]:
        return (*array.shape[:2], tokens, *array.shape[3:]) if made.flexible else array.shape

    tokens = get_new_symbol() if made.flexible else None
    values = {name: mb.placeholder(shape(each, tokens), dtype=types.fp16) for name, each in made.inputs.items()}
    program = Program()
    with Function(values, opset_version=ct.target.iOS18) as function:
        function.set_outputs([mb.identity(x=made.function(mb, *function.inputs.values()), name="y")])
    program.add_function("main", function)
    lengths = ct.RangeDim(1, made.flexible, default=1) if made.flexible else None
    kinds = [ct.TensorType(name=n, shape=shape(each, lengths), dtype=np.float16) for n, each in made.inputs.items()]
    return ct.convert(
        program,
        inputs=kinds,
        minimum_deployment_target=ct.target.iOS18,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )


def _numbers(seed: int, *shape: int, size: float = 1.0) -> Floats:
    """Return numbers of fp16 in [-size, size), by a seed."""
    numbers = np.random.default_rng(seed).random(shape, np.float32) * (2 * size) - size
    return np.asarray(numbers.astype(np.float16), np.float32)


def _product(weight: Floats, x: Floats) -> Floats:
    """Return a convolution of [out, in] with x [1, in, T, 1]."""
    return np.asarray(np.einsum("oi,bits->bots", weight, x, optimize=True), np.float32)


def _of_weights(asked: Mapping[str, Any]) -> Made:
    """Return matrices that follow one another, of `bytes` bytes of weights in all."""
    width = min(WIDTH, int(asked.get("width", WIDTH)))
    first = _numbers(0, width, width, size=(3 / width) ** 0.5)  # keeps the size of what it multiplies
    whole, rest = divmod(int(asked["bytes"]) // 2, width * width)
    rows = [width] * whole + [rest // width] * (rest >= width)

    def matrices() -> Iterator[Floats]:  # made one by one, and no two are equal
        return (np.roll(first, place, axis=1)[:count] for place, count in enumerate(rows))

    def function(mb: Any, value: Any) -> Any:
        for matrix in matrices():
            value = mb.conv(x=value, weight=matrix.astype(np.float16)[:, :, None, None])
        return value

    x = _numbers(1, 1, width, int(asked.get("tokens", 4)), 1)
    expected = x
    for matrix in matrices():
        expected = np.asarray(_product(matrix, expected).astype(np.float16), np.float32)
    return Made(function, {"x": x}, expected)


def _of_scores(asked: Mapping[str, Any]) -> Made:
    """Return attention of `heads` heads, `queries` and `keys`; a query sees `window` keys on each side."""
    heads, queries, keys = (int(asked.get(name, 1)) for name in ("heads", "queries", "keys"))
    q, k, v = (_numbers(i, 1, heads, count, HEAD) for i, count in enumerate((queries, keys, keys)))
    far = np.abs(np.arange(queries)[:, None] - np.arange(keys)[None]) > int(asked.get("window", keys))
    mask = np.where(far, np.float32(-1e4), np.float32(0))[None, None]
    scores = q @ k.transpose(0, 1, 3, 2) / HEAD**0.5 + mask
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (chances / chances.sum(-1, keepdims=True)) @ v

    def function(mb: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=np.float16(HEAD**-0.5))
        return mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=mask), axis=-1), y=v)

    return Made(function, {"q": q, "k": k, "v": v, "mask": mask}, np.asarray(expected, np.float32), axis=3)


def _of_deep_input(asked: Mapping[str, Any]) -> Made:
    """Return a product with a wide matrix, whose input is cut into `pieces`, which are multiplied apart and added."""
    inputs, outputs, pieces = (int(asked[name]) for name in ("inputs", "outputs", "pieces"))
    weight = _numbers(0, outputs, inputs, size=(3 / inputs) ** 0.5)
    x = _numbers(1, 1, inputs, int(asked["tokens"]), 1)

    def function(mb: Any, value: Any) -> Any:
        parts = mb.split(x=value, num_splits=pieces, axis=1) if pieces > 1 else [value]
        weights = np.split(weight.astype(np.float16)[:, :, None, None], pieces, axis=1)
        products = [mb.conv(x=part, weight=one) for part, one in zip(parts, weights, strict=True)]
        total = products[0]
        for one in products[1:]:
            total = mb.add(x=total, y=one)
        return total

    return Made(function, {"x": x}, _product(weight, x))


def _of_shapes(asked: Mapping[str, Any]) -> Made:
    """Return such matrices for passes of `tokens` tokens, with fixed shapes or with a range of shapes up to `most`."""
    made = _of_weights(asked)
    return replace(made, flexible=int(asked.get("most", 0)))


MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Made]] = {
    "weights": _of_weights,
    "scores": _of_scores,
    "deep": _of_deep_input,
    "shapes": _of_shapes,
}
