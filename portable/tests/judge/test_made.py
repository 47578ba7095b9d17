"""Packages with images, with several functions and with control flow: each is judged whole, and told as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.judge.asked import Asked
from portable_coreml.judge.report import JudgedFunction, judge

_HALF = (1, 8, 4, 32)
_PICTURE = (1, 3, 8, 64)
_KERNEL = (np.random.default_rng(0).standard_normal((8, 3, 3, 3)) * 0.1).astype(np.float16)
Places = dict[str, tuple[str, ...]]


def saved(path: Path, program: Callable[..., Any], specs: list[Any], **options: Any) -> Path:
    """Save a program as it is written, and return its path."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    target = ct.target.iOS18
    made = mb.program(input_specs=specs, opset_version=target)(program)
    empty = ct.PassPipeline.EMPTY
    ct.convert(made, convert_to="mlprogram", minimum_deployment_target=target, pass_pipeline=empty, **options).save(
        str(path)
    )
    return path


def of_halves(path: Path, program: Callable[[Any], Any], shape: tuple[int, ...] = _HALF) -> Path:
    """Save a program with an input "x" of fp16."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    return saved(
        path, program, [mb.TensorSpec(shape, dtype=types.fp16)], inputs=[ct.TensorType("x", shape, np.float16)]
    )


def of_pixels(path: Path, layout: str, kind: str = "fp32", beside: bool = False) -> Path:
    """Save a program of an image "x" of 8 by 64, perhaps with an fp16 array "k" beside it."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    shape = _PICTURE if layout in ("RGB", "BGR") else (1, 1, *_PICTURE[2:])

    row = (1, shape[1], 1, shape[3])

    def seen(x: Any) -> Any:
        half = mb.mul(x=mb.cast(x=x, dtype="fp16"), y=np.float16(1 / 255))
        return mb.relu(x=mb.conv(x=half, weight=_KERNEL[:, : shape[1]], pad_type="same"), name="y")

    def seen_beside(x: Any, k: Any) -> Any:
        return seen(mb.mul(x=x, y=mb.cast(x=k, dtype=kind)))

    specs = [mb.TensorSpec(shape, dtype=getattr(types, kind))]
    inputs: list[Any] = [ct.ImageType("x", shape, color_layout=getattr(ct.colorlayout, layout))]
    if beside:
        specs.append(mb.TensorSpec(row, dtype=types.fp16))
        inputs.append(ct.TensorType("k", row, np.float16))
    return saved(path, seen_beside if beside else seen, specs, inputs=inputs)


def of_functions(path: Path, default: str, **programs: Path) -> Path:
    """Save a package with a function for each program."""
    import coremltools as ct

    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, program in programs.items():
        descriptor.add_function(str(program), "main", name)
    descriptor.default_function_name = default
    ct.utils.save_multifunction(descriptor, str(path))
    return path


def projected(x: Any) -> Any:
    from coremltools.converters.mil import Builder as mb

    weight = np.linspace(-0.5, 0.5, 64).reshape(8, 8, 1, 1).astype(np.float16)
    return mb.relu(x=mb.conv(x=x, weight=weight, name="c"), name="y")


def with_sine(x: Any) -> Any:
    from coremltools.converters.mil import Builder as mb

    return mb.sinh(x=projected(x), name="z")


def chosen(x: Any) -> Any:
    """Double a positive sum's numbers, and take three times a negative one's from zero."""
    from coremltools.converters.mil import Builder as mb

    sum_of_all = mb.reduce_sum(x=x, axes=[0, 1, 2, 3], keep_dims=False)
    return mb.cond(
        pred=mb.greater(x=sum_of_all, y=np.float16(0), name="positive"),
        _true_fn=lambda: mb.mul(x=x, y=np.float16(2)),
        _false_fn=lambda: mb.mul(x=x, y=np.float16(-3)),
        name="y",
    )


def repeated(times: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a program that does a step over and over."""

    def program(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        _, last = mb.while_loop(
            _cond=lambda i, v: mb.less(x=i, y=np.int32(times), name="more"),
            _body=lambda i, v: (mb.add(x=i, y=np.int32(1), name="next"), step(v)),
            loop_vars=(np.int32(0), x),
            name="loop",
        )
        return mb.relu(x=last, name="y")

    return program


def squared(x: Any) -> Any:
    from coremltools.converters.mil import Builder as mb

    return mb.square(x=x)


def halved(x: Any) -> Any:
    from coremltools.converters.mil import Builder as mb

    return mb.mul(x=x, y=np.float16(0.5))


@dataclass(frozen=True)
class Told:
    """A package, and what its judgement must say.

    Attributes:
        make: saves it.
        domains: of each input of every function: its kind, type and shape.
        functions: their names.
        errors: the places of each rule's errors.
        shares: whether the shares off the Neural Engine are known.
        off: the functions that leave it with some of their work.
        largest: of some results, the largest magnitude for ones.
        asked: what is asked for.
    """

    make: Callable[[Path], Path]
    domains: Mapping[str, tuple[str, str, tuple[int, ...]]]
    functions: tuple[str, ...] = ("main",)
    errors: Places = field(default_factory=dict)
    shares: bool = True
    off: tuple[str, ...] = ()
    largest: Mapping[str, float] = field(default_factory=dict)
    asked: Asked = Asked()


HALVES = {"x": ("normal", "fp16", _HALF)}
ONES = Asked(ranges={"x": (1.0, 1.0)})
MINUS = Asked(ranges={"x": (-1.0, -1.0)})
SAME = {"x": ("range", "fp16", _HALF)}


def parted(path: Path) -> Path:
    """Two functions, of which one leaves the Neural Engine; the other one is the default."""
    plain = of_halves(path.with_name("plain.mlpackage"), projected)
    sine = of_halves(path.with_name("sine.mlpackage"), with_sine)
    return of_functions(path, "plain", plain=plain, sine=sine)


CONTROL: Places = {"O2": ("y",), "T2": ("positive", "y")}
LOOP: Places = {"O2": ("loop_0",), "T2": ("loop_0", "more", "next")}
MADE = {
    "an RGB image": Told(lambda p: of_pixels(p, "RGB"), {"x": ("range", "image", _PICTURE)}),
    "a BGR image and an array": Told(
        lambda p: of_pixels(p, "BGR", beside=True),
        {"x": ("range", "image", _PICTURE), "k": ("normal", "fp16", (1, 3, 1, 64))},
    ),
    "a grey image": Told(lambda p: of_pixels(p, "GRAYSCALE"), {"x": ("range", "image", (1, 1, 8, 64))}),
    "a grey image of fp16": Told(
        lambda p: of_pixels(p, "GRAYSCALE_FLOAT16", "fp16"), {"x": ("range", "image", (1, 1, 8, 64))}
    ),
    "two functions": Told(parted, HALVES, ("plain", "sine"), {"O1": ("sine: z",)}, off=("sine",)),
    "one of two functions": Told(parted, HALVES, ("plain",), asked=Asked(function="plain")),
    "the other one": Told(parted, HALVES, ("sine",), {"O1": ("z",)}, off=("sine",), asked=Asked(function="sine")),
    "a branch that is taken": Told(
        lambda p: of_halves(p, chosen), SAME, errors=CONTROL, shares=False, largest={"y": 2.0}, asked=ONES
    ),
    "the other branch": Told(
        lambda p: of_halves(p, chosen), SAME, errors=CONTROL, shares=False, largest={"y": 3.0}, asked=MINUS
    ),
    "a loop": Told(
        lambda p: of_halves(p, repeated(3, halved)), SAME, errors=LOOP, shares=False, largest={"y": 0.125}, asked=ONES
    ),
    "a loop that overflows in its fifth step": Told(
        lambda p: of_halves(p, repeated(5, squared)),
        SAME,
        errors=LOOP | {"fp16-overflow": ("loop_1",)},
        shares=False,
        largest={"y": 2.0**32},
        asked=Asked(ranges={"x": (2.0, 2.0)}),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_a_made_package_is_judged_as_it_is(name: str, tmp_path: Path) -> None:
    told = MADE[name]
    report = judge(told.make(tmp_path / "m.mlpackage"), told.asked)
    assert tuple(function.shown.name for function in report.functions) == told.functions
    errors: Places = {}
    for group in report.findings:
        if group.level == "error":
            errors[group.rule] = errors.get(group.rule, ()) + group.places
    assert errors == told.errors
    for function in report.functions:
        assert function.not_run == "" and function.rows
        assert {d.name: (d.kind, d.dtype, d.shape) for d in function.domains} == told.domains
        _check_shares(function, told)
        largest = {row.output: row.largest for row in function.rows}
        assert {result: largest[result] for result in told.largest} == told.largest


def _check_shares(function: JudgedFunction, told: Told) -> None:
    if not told.shares:
        assert function.off_operations is function.off_bytes is None
    elif function.shown.name in told.off:
        assert function.off_operations and function.off_bytes
    else:
        assert function.off_operations == function.off_bytes == 0


def test_functions_share_their_weights_and_these_count_once(tmp_path: Path) -> None:
    report = judge(parted(tmp_path / "m.mlpackage"), Asked(runs=False))
    alone = judge(tmp_path / "plain.mlpackage", Asked(runs=False))
    assert [part.bytes for part in report.parts] == [part.bytes for part in alone.parts]
