"""A judgement: what is found in a program, how bad it is, and what it costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.errors import InputError
from portable_coreml.files.bundle import compile_model
from portable_coreml.judge.asked import Asked
from portable_coreml.judge.limits import SYSTEMS, limits
from portable_coreml.judge.report import Group, Report, judge
from portable_coreml.judge.rule import Target

_HALF = (1, 8, 4, 32)  # of an input that breaks no rule by its shape


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., Path]:
    """A package of an mb program that computes in fp16 from an fp16 input."""

    def make(program: Callable[[Any], Any]) -> Path:
        import coremltools as ct
        from coremltools.converters.mil import Builder as mb
        from coremltools.converters.mil.mil import types

        spec = mb.TensorSpec(_HALF, dtype=types.fp16)
        made = mb.program(input_specs=[spec], opset_version=ct.target.iOS17)(program)
        target = {"minimum_deployment_target": ct.target.iOS17, "inputs": [ct.TensorType("x", _HALF, np.float16)]}
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}.mlpackage"
        ct.convert(made, convert_to="mlprogram", pass_pipeline=ct.PassPipeline.EMPTY, **target).save(str(path))
        return path

    return make


def found(report: Report, rule: str) -> Group | None:
    """Return the worst finding of a rule."""
    return next((group for group in report.findings if group.rule == rule), None)


def of(report: Report, rule: str) -> Group:
    group = found(report, rule)
    assert group is not None, [(g.rule, g.why) for g in report.findings]
    return group


def test_a_sound_package_and_its_bundle_are_judged_alike(attention_package: Path, tmp_path: Path) -> None:
    """States are filled before it is judged; from protobuf or from text the same is found."""
    report = judge(attention_package)
    bundle = judge(compile_model(attention_package, tmp_path / "m.mlmodelc"))
    assert report.errors == 0
    assert [(g.rule, g.why) for g in report.findings] == [(g.rule, g.why) for g in bundle.findings]
    (function,) = report.functions
    assert function.rows == bundle.functions[0].rows
    assert function.off_operations == function.off_bytes == 0
    assert [item.name for item in function.shown.states] == ["cache_k", "cache_v"]
    read = next(row for row in function.rows if row.kind == "read_state")
    assert read.largest > 0
    assert 0 < max(row.total for row in function.rows) < 0.01


def test_stored_bytes_are_held_to_each_systems_limit(attention_package: Path, tmp_path: Path) -> None:
    """One byte more than macOS 27 takes; the file is sparse."""
    bundle = compile_model(attention_package, tmp_path / "m.mlmodelc")
    weights = bundle / "weights/weight.bin"
    data = weights.read_bytes()
    weights.unlink()  # it is a link to the package's
    weights.write_bytes(data)
    most = limits("macOS 27").weight_bytes.most
    for size in (most, most + 1):
        os.truncate(weights, size)
        report = judge(bundle, Asked(runs=False))
        (part,) = report.parts
        assert part.bytes == size
        assert part.systems == tuple(s for s in SYSTEMS if size <= limits(s).weight_bytes.most)
        asked = Asked(Target(named=("macOS 27",)), runs=False)
        assert [g.rule for g in judge(bundle, asked).findings if g.level == "error"] == ["W1"] * (size > most)


def _with_sine(x: Any) -> Any:
    from coremltools.converters.mil import Builder as mb

    weight = np.full((64, 8, 3, 3), 0.01, np.float16)
    many = mb.conv(x=x, weight=weight, pad_type="same", name="many")
    small = mb.reduce_mean(x=many, axes=[1, 2], keep_dims=True, name="small")
    return mb.sinh(x=small, name="off")


def test_what_leaves_the_engine_is_an_error_by_its_share(package: Callable[..., Path]) -> None:
    """One finding for a rule, with its share of arithmetic and of bytes; a small share is a warning."""
    path = package(_with_sine)
    report = judge(path)
    (function,) = report.functions
    assert function.placed["ineligible"] == 1
    assert function.off_operations is not None and function.off_bytes is not None
    assert 0 < function.off_operations < 0.002 < function.off_bytes < 0.05
    group = of(report, "O1")
    assert (group.level, group.places, group.evidence) == ("warn", ("off",), "predicted")
    assert (group.operations, group.bytes) == (function.off_operations, function.off_bytes)
    strict = judge(path, Asked(off=0.002))
    assert of(strict, "O1").level == "error" and strict.findings[0].rule == "O1"
    assert of(judge(path, Asked(off=0.002, accept=("O1",))), "O1").level == "info"


def test_findings_stand_in_order_of_level_and_cost(package: Callable[..., Path]) -> None:
    report = judge(package(_with_sine), Asked(off=0.0))
    levels = [group.level for group in report.findings]
    assert levels == sorted(levels, key=["error", "warn", "info"].index)
    costs = [
        max(g.operations, g.bytes)
        for g in report.findings
        if g.level == "info" and g.operations is not None and g.bytes
    ]
    assert costs == sorted(costs, reverse=True)


def test_an_overflow_is_an_error_where_it_reaches_an_output(package: Callable[..., Path]) -> None:
    """Of a stated domain of 300 the squares are too large for fp16; a sigmoid hides it."""

    def squares(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        return mb.square(x=x, name="squares")

    def hidden(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        return mb.sigmoid(x=mb.square(x=x, name="squares"), name="y")

    asked = Asked(ranges={"x": (299.0, 300.0)})
    group = of(judge(package(squares), asked), "fp16-overflow")
    assert (group.level, group.places) == ("error", ("squares",)) and "9e+04" in group.why
    assert of(judge(package(hidden), asked), "fp16-overflow").level == "warn"
    assert found(judge(package(squares), Asked(ranges={"x": (0.0, 200.0)})), "fp16-overflow") is None


def test_the_first_operation_that_loses_too_much_is_named_with_its_own_error(package: Callable[..., Path]) -> None:
    """A sum with 2048 keeps no half. The difference gives that back at its full size; what follows passes it on."""

    def cancels(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        large = mb.add(x=x, y=np.float16(2048), name="large")
        small = mb.sub(x=large, y=np.float16(2048), name="small")
        return mb.mul(x=small, y=np.float16(0.5), name="y")

    report = judge(package(cancels))
    group = of(report, "fp16-error")
    assert (group.level, group.places, group.evidence) == ("error", ("small",), "computed")
    rows = {row.output: row for row in report.functions[0].rows}
    assert rows["large"].total < 0.001
    assert rows["small"].total > 0.1 and rows["small"].own > 0.1  # its input is at best rounded to 2
    assert rows["y"].total > 0.1 and rows["y"].own < 0.001
    assert found(judge(package(cancels), Asked(error=10.0)), "fp16-error") is None


def test_numbers_below_fp16s_normal_ones_are_told(package: Callable[..., Path]) -> None:
    def shrinks(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        return mb.mul(x=mb.mul(x=x, y=np.float16(1e-5), name="small"), y=np.float16(1e4), name="y")

    assert of(judge(package(shrinks)), "fp16-subnormal").places == ("small",)


def test_a_probe_of_zeros_finds_a_division_by_zero(package: Callable[..., Path]) -> None:
    """An epsilon whose inverse fp16 does not hold: 0 * infinity, which random inputs never meet."""

    def normed(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        size = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
        scale = mb.real_div(x=np.float16(1), y=mb.add(x=size, y=np.float16(1e-6)), name="scale")
        return mb.mul(x=x, y=scale, name="y")

    path = package(normed)
    group = of(judge(path), "probe-zeros")
    assert (group.level, group.places) == ("error", ("scale",)) and "in fp32 too" not in group.why
    assert found(judge(path, Asked(ranges={"x": (1.0, 2.0)})), "probe-zeros") is None


def test_edges_of_an_assumed_domain_are_a_warning(package: Callable[..., Path]) -> None:
    """Nobody said that inputs may be a hundred times as large; whoever states it gets an error."""

    def powers(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        return mb.square(x=x, name="y")

    path = package(powers)
    assert of(judge(path), "probe-largest").level == "warn"
    assert of(judge(path, Asked(ranges={"x": (-256.0, 200.0)})), "probe-least").level == "error"
    assert found(judge(path, Asked(ranges={"x": (-4.0, 4.0)})), "probe-largest") is None


def test_a_domain_that_the_program_is_not_for_is_asked_for(package: Callable[..., Path]) -> None:
    """The logarithm of a difference is NaN for half of all numbers in fp32 too: that is no fault of fp16."""

    def logarithm(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        return mb.log(x=mb.mul(x=x, y=np.float16(-1)), name="y")

    path = package(logarithm)
    group = of(judge(path), "domain")
    assert group.level == "error" and "--range" in group.remedy and found(judge(path), "fp16-overflow") is None
    assert found(judge(path, Asked(ranges={"x": (-3.0, -1.0)})), "domain") is None


def test_recorded_inputs_are_used(package: Callable[..., Path], tmp_path: Path) -> None:
    def squares(x: Any) -> Any:
        from coremltools.converters.mil import Builder as mb

        return mb.square(x=x, name="y")

    path = package(squares)
    np.savez(tmp_path / "in.npz", x=np.full(_HALF, 7.0, np.float32))
    report = judge(path, Asked(inputs=tmp_path / "in.npz"))
    assert report.functions[0].rows[0].largest == 49
    assert [domain.kind for domain in report.functions[0].domains] == ["given"]
    np.savez(tmp_path / "other.npz", z=np.zeros(3))
    with pytest.raises(InputError, match="none of the inputs x"):
        judge(path, Asked(inputs=tmp_path / "other.npz"))


def test_what_cannot_be_run_is_an_error_beside_what_the_rules_say(attention_package: Path, tmp_path: Path) -> None:
    """A package without its weights, as one may be published: it is judged by rules, and nobody takes that for all."""
    bundle = compile_model(attention_package, tmp_path / "m.mlmodelc")
    (bundle / "weights/weight.bin").unlink()
    report = judge(bundle)
    assert of(report, "run").level == "error" and "weight.bin is missing" in of(report, "run").why
    assert report.functions[0].rows == () and "missing" in report.functions[0].not_run
    assert judge(bundle, Asked(runs=False)).errors == 0
