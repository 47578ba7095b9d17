"""Residency: every operation but constants must run on the Neural Engine, or be predicted to; unknown is a failure.

On a Mac MLComputePlan measures, at the default shape T = 1 and, through a copy of the package whose default is the
upper bound, at T = max, since a plan describes the default shape only; an encoder's program has a single shape.
Elsewhere the portable engine's placement rules predict, for the whole range of T at once. The two are never mixed:
each row carries its evidence.

That an operation can run there does not mean that Core ML chooses to run it there. A program with so few weights that
dispatching it does not pay (rule W5; the demo's programs are such) is expected on the CPU. It does not fail when an
operation that the Neural Engine supports is given to the CPU.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmill.gates.thresholds import Measurement
from shardmill.machine import is_portable

SMALL = "W5"  # the rule of the dispatcher's cost model for small programs
WITHOUT_DEVICE = ("const", "read_state")  # rule O15: prefixes of operations that a plan gives no device


@dataclass(frozen=True)
class Row:
    """One operation at one shape."""

    shape: str  # "T=1", "T=4", or "T=1..4"
    function: str
    output: str
    operation: str
    status: str  # "eligible" (predicted), "ane" or "not_chosen" (measured), "ineligible", "unknown" or "no_device"
    device: str  # measured: the preferred device; predicted: ""
    evidence: str  # "predicted" or "measured"
    rules: tuple[str, ...] = ()


def inspect(package: Path, bundle: Path, tokens: int, fixed: bool = False) -> tuple[list[Row], list[dict[str, Any]]]:
    """A row for each operation at each shape that is looked at, and findings on the program as a whole.

    Args:
        package: the .mlpackage.
        bundle: the .mlmodelc that was compiled from it.
        tokens: the upper bound of T.
        fixed: whether T is always that.
    """
    predicted, findings = predict(package, tokens, fixed)
    if is_portable():
        return predicted, findings
    import coremltools as ct

    rows = list(measure(bundle, f"T={tokens}" if fixed else "T=1"))
    if tokens > 1 and not fixed:
        from shardmill.convert.package import with_default_tokens

        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / package.name
            with_default_tokens(package, copy, tokens)
            rows += measure(Path(ct.models.utils.compile_model(str(copy))), f"T={tokens}")
    return rows, [finding for finding in findings if finding["rule"] == SMALL]  # the size is a fact


def predict(package: Path, tokens: int, fixed: bool = False) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows and findings by the placement rules."""
    from portable_coreml.judge.placement import judge_package

    verdicts = judge_package(package)
    shape = f"T=1..{tokens}" if tokens > 1 and not fixed else f"T={tokens}"
    rows = [Row(shape, v.function, v.output, v.kind, v.status, "", "predicted", v.rules) for v in verdicts.rows]
    return rows, [asdict(finding) for finding in verdicts.findings]


def measure(bundle: Path, shape: str) -> Iterator[Row]:
    """Rows by Core ML's own plan for a compiled bundle."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    plan = MLComputePlan.load_from_path(str(bundle), compute_units=ct.ComputeUnit.CPU_AND_NE)
    for name, function in plan.model_structure.program.functions.items():
        for op in _nested_operations(function.block):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            device = "" if usage is None else type(usage.preferred_compute_device).__name__
            able = [] if usage is None else [type(d).__name__ for d in usage.supported_compute_devices]
            kind = op.operator_name
            yield Row(shape, name, _output_of(op), kind, measured_status(kind, device, able), device, "measured")


def _output_of(op: Any) -> str:
    """The name of an operation of a plan, which is also the rules' name: its first output, or the state it writes."""
    if op.outputs:
        return str(op.outputs[0].name)
    written = op.inputs["input"].bindings if "input" in op.inputs else ()
    return next((str(binding.name) for binding in written if binding.name), "")


def _nested_operations(block: Any) -> Iterator[Any]:
    """All operations of a block and of the blocks in it."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from _nested_operations(inner)


def measured_status(kind: str, device: str, able: Sequence[str]) -> str:
    """The status that a plan's answer amounts to.

    Args:
        kind: the operation's type.
        device: the device that the plan prefers; "" if it names none.
        able: the devices that support the operation.
    """
    if "NeuralEngine" in device:
        return "ane"
    if device:
        return "not_chosen" if any("NeuralEngine" in name for name in able) else "ineligible"
    plain = kind.split(".")[-1]  # "ios18.conv" -> "conv"
    return "no_device" if plain.startswith(WITHOUT_DEVICE) else "unknown"


def measurements(rows: Iterable[Row], findings: Iterable[dict[str, Any]]) -> list[Measurement]:
    """The gate's numbers.

    `not_chosen` is among them only where a plan was read and the program is large enough for the Neural Engine.
    """
    rows, findings = list(rows), list(findings)
    counts = Counter(row.status for row in rows)
    errors = [f for f in findings if f["severity"] == "error" and not f.get("output")]
    chosen = []
    if any(row.evidence == "measured" for row in rows) and not any(f["rule"] == SMALL for f in findings):
        chosen = [Measurement("not_chosen", counts["not_chosen"], first(rows, "not_chosen"))]
    return [
        Measurement("ineligible", counts["ineligible"], first(rows, "ineligible")),
        Measurement("unknown", counts["unknown"], first(rows, "unknown")),
        *chosen,
        Measurement("program_findings", len(errors), "; ".join(f"{f['rule']}: {f['why']}" for f in errors[:2])),
    ]


def first(rows: Iterable[Row], status: str) -> str:
    """Names the first operation with a status, for an error line, or returns ''."""
    return next(
        (f"first: {r.operation} {r.output} {','.join(r.rules)}".strip() for r in rows if r.status == status), ""
    )
