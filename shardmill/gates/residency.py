"""Residency: every operation but constants must run on the Neural Engine, or be predicted to; unknown is a failure.

On a Mac MLComputePlan measures, at the default shape T = 1 and, through a copy of the package whose default is the
upper bound, at T = max, since a plan describes the default shape only. Elsewhere the portable engine's placement rules
predict, for the whole range of T at once. The two are never mixed: each row carries its evidence.

That an operation can run there and that Core ML's dispatcher chooses to are two things: a program whose weights are so
few that the dispatch does not pay (rule W5; the demo's are) is expected on the CPU, and what is given to the CPU though
the Neural Engine supports it does not fail such a program.
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


def inspect(package: Path, bundle: Path, tokens: int) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows for every operation, and findings on the program as a whole. `tokens` is the upper bound of T."""
    predicted, findings = predict(package, tokens)
    if is_portable():
        return predicted, findings
    import coremltools as ct

    rows = list(measure(bundle, "T=1"))
    if tokens > 1:
        from shardmill.convert.package import with_default_tokens

        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / package.name
            with_default_tokens(package, copy, tokens)
            rows += measure(Path(ct.models.utils.compile_model(str(copy))), f"T={tokens}")
    return rows, [finding for finding in findings if finding["rule"] == SMALL]  # the size is a fact


def predict(package: Path, tokens: int) -> tuple[list[Row], list[dict[str, Any]]]:
    """By the placement rules."""
    from portable_coreml.judge.placement import judge_package

    verdicts = judge_package(package)
    shape = f"T=1..{tokens}" if tokens > 1 else "T=1"
    rows = [Row(shape, v.function, v.output, v.kind, v.status, "", "predicted", v.rules) for v in verdicts.rows]
    return rows, [asdict(finding) for finding in verdicts.findings]


def measure(bundle: Path, shape: str) -> Iterator[Row]:
    """By Core ML's own plan for a compiled bundle."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    plan = MLComputePlan.load_from_path(str(bundle), compute_units=ct.ComputeUnit.CPU_AND_NE)
    for name, function in plan.model_structure.program.functions.items():
        for op in nested_operations(function.block):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            device = "" if usage is None else type(usage.preferred_compute_device).__name__
            able = [] if usage is None else [type(d).__name__ for d in usage.supported_compute_devices]
            kind = op.operator_name
            yield Row(shape, name, output_of(op), kind, measured_status(kind, device, able), device, "measured")


def output_of(op: Any) -> str:
    """What a row calls an operation of a plan, as the rules' verdicts do: its first output, or the state it writes."""
    if op.outputs:
        return str(op.outputs[0].name)
    written = op.inputs["input"].bindings if "input" in op.inputs else ()
    return next((str(binding.name) for binding in written if binding.name), "")


def nested_operations(block: Any) -> Iterator[Any]:
    """All operations of a block and of the blocks in it."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from nested_operations(inner)


def measured_status(kind: str, device: str, able: Sequence[str]) -> str:
    """What a plan's answer means: the device that it prefers, and those that could."""
    if "NeuralEngine" in device:
        return "ane"
    if device:
        return "not_chosen" if any("NeuralEngine" in name for name in able) else "ineligible"
    plain = kind.split(".")[-1]  # "ios18.conv" -> "conv"
    return "no_device" if plain.startswith(WITHOUT_DEVICE) else "unknown"


def measurements(rows: Iterable[Row], findings: Iterable[dict[str, Any]]) -> list[Measurement]:
    """The gate's numbers; whether the dispatcher chose the Neural Engine only where it was asked and should have."""
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
    """The first operation with a status, for an error line."""
    return next(
        (f"first: {r.operation} {r.output} {','.join(r.rules)}".strip() for r in rows if r.status == status), ""
    )
