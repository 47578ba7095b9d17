"""Applies the rule book: one verdict per operation and the findings behind them.

A verdict says "eligible", "ineligible" or "unknown", and is always a prediction. Eligible means that the engine can
run the operation, not that Core ML's dispatcher will choose it. Constants and state reads have no device and get
"no_device".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from portable_coreml.files.load import load_model
from portable_coreml.files.model import LoadedModel
from portable_coreml.judge.placement.rule import Finding
from portable_coreml.judge.placement.rules import RULES
from portable_coreml.judge.placement.subject import Subject, Target, has_device, label, subjects
from portable_coreml.program import Op

_ELIGIBLE = frozenset(
    [
        "conv",
        "matmul",
        "linear",
        "add",
        "sub",
        "mul",
        "real_div",
        "pow",
        "square",
        "sqrt",
        "rsqrt",
        "exp",
        "sigmoid",
        "silu",
        "tanh",
        "softmax",
        "layer_norm",
        "reduce_sum",
        "reduce_mean",
        "reduce_max",
        "reduce_min",
        "reduce_sum_square",
        "reduce_l2_norm",
        "reshape",
        "transpose",
        "concat",
        "split",
        "slice_by_index",
        "slice_by_size",
        "squeeze",
        "expand_dims",
        "cast",
        "select",
        "maximum",
        "minimum",
        "clip",
        "pad",
        "write_state",
        "coreml_update_state",
    ]
)  # measured eligible on M4 with macOS 27 (751K, notes/coreml_dispatch.md 3.2); state writes: ANEForge, all chips


@dataclass(frozen=True)
class OpVerdict:
    """One operation: `status` is eligible, ineligible, unknown or no_device; `rules` are the ids behind it."""

    function: str
    output: str
    kind: str
    status: str
    rules: tuple[str, ...] = ()
    evidence: str = "predicted"


@dataclass(frozen=True)
class Verdicts:
    """Every operation's verdict, and every finding, those of the whole program among them (output "")."""

    rows: tuple[OpVerdict, ...]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")


def judge_package(path: str | Path, target: Target | None = None) -> Verdicts:
    """Verdicts on a package or compiled bundle. Raises ProgramError if it can't be read."""
    return judge_model(load_model(Path(path)), target or Target())


def judge_model(model: LoadedModel, target: Target) -> Verdicts:
    """Verdicts on every function of a model."""
    rows: list[OpVerdict] = []
    findings: list[Finding] = []
    for subject in subjects(model, target):
        found = [finding for rule in RULES for finding in rule.findings(subject)]
        rows.extend(verdicts(subject, found))
        findings.extend(found)
    return Verdicts(tuple(rows), tuple(findings))


def verdicts(subject: Subject, findings: list[Finding]) -> Iterator[OpVerdict]:
    """One verdict per operation of a function, from the findings on it."""
    errors: dict[str, list[str]] = {}
    for finding in findings:
        if finding.severity == "error" and finding.output:
            errors.setdefault(finding.output, []).append(finding.rule)
    for op in subject.ops:
        name = label(op)
        status, rules = _status(op, _of_operation(subject, op, errors))
        yield OpVerdict(subject.function.name, name, op.kind, status, rules)


def _of_operation(subject: Subject, op: Op, errors: dict[str, list[str]]) -> tuple[str, ...]:
    """Ids of the errors on an operation, and on the compressed weights that it takes (W6 strikes the convolution)."""
    found = list(errors.get(label(op), ()))
    for bindings in op.inputs.values():
        for binding in bindings:
            if isinstance(binding, str) and subject.is_constant(binding):
                found += errors.get(binding, ())
    return tuple(dict.fromkeys(found))


def _status(op: Op, errors: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if not has_device(op):
        return "no_device", errors or ("O15",)
    if errors:
        return "ineligible", errors
    return ("eligible" if op.kind in _ELIGIBLE else "unknown"), ()
