"""Residency: every operation but constants must run on the Neural Engine, or be predicted to; unknown is a failure.

On a Mac MLComputePlan measures. A plan describes the default shape only, which is T = 1. For T = max, the plan of a
copy of the package is read whose default is the upper bound. An encoder's program has a single shape. A program of
fixed widths has a function for each width, and a plan names the default function only (ExecuTorch,
coreml_compute_plan.py). So each function is measured in a copy of the package that contains no other. Elsewhere the
portable engine's placement rules predict, for the whole range of T at once. The two are never mixed: each row carries
its evidence.

An operation that can run there need not be dispatched there by Core ML. A program with so few weights that dispatching
it does not pay (rule W5; the demo's programs, for example) is expected on the CPU. It does not fail if an operation
that the Neural Engine supports runs on the CPU.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kit_runner.compute_plan import planned
from kit_runner.packages import ONLY, with_default_tokens, with_one_function

from shardmill.gates.measurement import Measurement
from shardmill.machine import is_portable, native_call

SMALL = "W5"  # the rule of the dispatcher's cost model for small programs
SIZES = (SMALL, "W1", "W2")  # rules on a weight file, whose size is a fact, and on systems that no plan is of
NONE: Mapping[str, int] = {}


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


def inspect_placement(
    package: Path,
    bundle: Path,
    tokens: int,
    fixed: bool = False,
    functions: Mapping[str, int] = NONE,
    systems: Sequence[str] = (),
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return a row for each operation at each inspected shape, and findings on the program as a whole.

    Args:
        package: the .mlpackage.
        bundle: the .mlmodelc that was compiled from it.
        tokens: the upper bound of T.
        fixed: True if T always equals `tokens`.
        functions: for a program of fixed widths, the width T of each function by name.
        systems: the systems that the program must suit. Without any, not to suit one of all known systems is a warning.
    """
    predicted, findings = predict(package, tokens, fixed or bool(functions), systems)
    if is_portable():
        return [_of_width(row, functions) for row in predicted], findings
    if functions:
        rows = list(measure_functions(package, functions))
    else:
        rows = list(measure_placement(bundle, f"T={tokens}" if fixed else "T=1"))
        if tokens > 1 and not fixed:
            rows += _measured_copy(package, partial(with_default_tokens, tokens=tokens), f"T={tokens}")
    return rows, [finding for finding in findings if finding["rule"] in SIZES and finding["severity"] == "warn"]


def _of_width(row: Row, functions: Mapping[str, int]) -> Row:
    """Return a row with the shape of its function, if the function has only one."""
    return replace(row, shape=f"T={functions[row.function]}") if row.function in functions else row


def predict(
    package: Path, tokens: int, fixed: bool = False, systems: Sequence[str] = ()
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return rows and findings according to the placement rules."""
    from portable_coreml.judge.placement import judge_package
    from portable_coreml.judge.rule import Target

    verdicts = judge_package(package, Target(named=tuple(systems)))
    shape = f"T=1..{tokens}" if tokens > 1 and not fixed else f"T={tokens}"
    rows = [Row(shape, v.function, v.output, v.kind, v.status, "", "predicted", v.rules) for v in verdicts.rows]
    return rows, [asdict(finding) for finding in verdicts.findings]


def measure_placement(bundle: Path, shape: str) -> Iterator[Row]:
    """Yield rows according to Core ML's own plan for a compiled bundle."""
    with native_call():
        rows = list(planned(bundle))
    yield from (Row(shape=shape, evidence="measured", **row) for row in rows)


def measure_functions(package: Path, functions: Mapping[str, int]) -> Iterator[Row]:
    """Yield the rows of each function, from plans of copies that contain only this function."""
    for name, width in functions.items():
        rows = _measured_copy(package, partial(with_one_function, name=name), f"T={width}")
        yield from (replace(row, function=name) if row.function == ONLY else row for row in rows)


def _measured_copy(package: Path, copied: Callable[[Path, Path], None], shape: str) -> list[Row]:
    """Return rows from the plan of a changed copy of a package, which `copied` writes from one path to the other."""
    import coremltools as ct

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / package.name
        copied(package, copy)
        bundle = Path(folder) / "copy.mlmodelc"  # without a path, coremltools leaves the bundle in the temporary folder
        with native_call():
            ct.models.utils.compile_model(str(copy), str(bundle))
        return list(measure_placement(bundle, shape))


def placement_measurements(rows: Iterable[Row], findings: Iterable[dict[str, Any]]) -> list[Measurement]:
    """Return the gate's numbers.

    `not_chosen` is included only if a plan was read and the program is large enough for the Neural Engine.
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
    """Return a text that names the first operation with a status, for an error line, or ''."""
    return next(
        (f"first: {r.operation} {r.output} {','.join(r.rules)}".strip() for r in rows if r.status == status), ""
    )
