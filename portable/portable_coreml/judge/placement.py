"""Applies the rule book: one verdict per operation and the findings behind them.

A verdict says "eligible", "ineligible" or "unknown", and is always a prediction. Eligible means that the engine can
run the operation, not that Core ML's dispatcher will choose it. Constants and state reads have no device and get
"no_device".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from portable_coreml.dtypes import BY_NAME
from portable_coreml.files.bundle import load_model
from portable_coreml.files.model import LoadedModel
from portable_coreml.judge.rule import Finding, Subject, Target, has_device, input_names, label, subjects
from portable_coreml.judge.rules import RULES
from portable_coreml.program import Binding, Op, TensorType, Value

OPERATIONS_PER_SECOND = 19e12
BYTES_PER_SECOND = 120e9
_FREE = frozenset({"reshape", "expand_dims", "squeeze", "identity"})  # another view of the same bytes
_RECURRENT = frozenset({"gru", "lstm", "rnn"})
_WEIGHTS = ("weight_ih", "weight_hh", "weight_ih_back", "weight_hh_back")
_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Work:
    """What an operation does at some shapes: arithmetic operations, and bytes that move through memory."""

    operations: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.operations / OPERATIONS_PER_SECOND, self.bytes / BYTES_PER_SECOND)

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)


def cost_shares(subject: Subject, shapes: _Shapes) -> dict[str, float]:
    """Return the label of an operation -> its share; the shares of a function add up to 1. Empty as `work` is."""
    seconds = {name: done.seconds for name, done in work(subject, shapes).items()}
    total = sum(seconds.values())
    return {name: spent / total for name, spent in seconds.items()} if total else {}


def work(subject: Subject, shapes: _Shapes) -> dict[str, Work]:
    """Return the label of an operation -> what it does.

    Empty if that can't be told: with control flow, or if a shape depends on data. `shapes` come from judge/shapes.py.
    """
    if any(op.blocks or any(out.name not in shapes for out in op.outputs) for op in subject.runtime_ops):
        return {}
    done: dict[str, Work] = {}
    for op in subject.runtime_ops:  # several writes to one state share its label
        done[label(op)] = done.get(label(op), Work()) + _work(subject, op, shapes)
    return done


def _work(subject: Subject, op: Op, shapes: _Shapes) -> Work:
    if op.kind in _FREE:
        return Work()
    moved = sum(_read(subject, out.name, shapes) for out in op.outputs)
    moved += sum(_read(subject, binding, shapes) for bindings in op.inputs.values() for binding in bindings)
    return Work(arithmetic_operations(subject, op, shapes), moved)


def _read(subject: Subject, binding: Binding, shapes: _Shapes) -> float:
    """Return the bytes that one value moves through memory; for a constant, the bytes that are stored."""
    if isinstance(binding, Value):
        return _stored(binding)
    producer = subject.producers.get(binding)
    if producer is not None and subject.is_constant(binding):
        parts = [*producer.attributes.values(), *(b for bound in producer.inputs.values() for b in bound)]
        return sum(_read(subject, part, shapes) for part in parts)
    known = binding in shapes and binding in subject.types
    return math.prod(shapes[binding]) * BY_NAME[subject.types[binding].dtype].bits / 8 if known else 0.0


def _stored(value: Value) -> float:
    kind = value.type
    if not isinstance(kind, TensorType) or kind.dtype == "string" or None in kind.shape:
        return 0.0
    return math.prod(n or 0 for n in kind.shape) * BY_NAME[kind.dtype].bits / 8


def arithmetic_operations(subject: Subject, op: Op, shapes: _Shapes) -> float:
    """Return the number of arithmetic operations.

    A multiplication and its addition are two. Outside matrix products, one per element.
    """
    if op.kind in _RECURRENT:
        weights = [_shape(subject, op, name, shapes) for name in _WEIGHTS if op.inputs.get(name)]
        x = _shape(subject, op, "x", shapes)  # [steps, batch, features]; each step multiplies with every weight
        if x and len(x) == 3 and all(weights):
            return 2.0 * x[0] * x[1] * sum(math.prod(weight or ()) for weight in weights)
    made = [float(math.prod(shapes[out.name])) for out in op.outputs if out.name in shapes]
    products = _products(subject, op, shapes)
    if products is not None:
        return 2 * sum(made) * products
    taken = [float(math.prod(shapes[name])) for name in input_names(op) if name in shapes]
    return max([sum(made), *taken])


def _products(subject: Subject, op: Op, shapes: _Shapes) -> float | None:
    """Return how many products are added up for one result; None if the operation is not a product of matrices."""
    if op.kind in ("conv", "linear"):
        weight = _shape(subject, op, "weight", shapes)
        return None if weight is None else float(math.prod(weight[1:]))
    if op.kind == "matmul":
        x, turned = _shape(subject, op, "x", shapes), subject.literal(op, "transpose_x")
        return None if not x else float(x[-2] if turned is not None and turned.any() and len(x) > 1 else x[-1])
    if op.kind == "scaled_dot_product_attention":
        key, value = _shape(subject, op, "key", shapes), _shape(subject, op, "value", shapes)
        return None if not key or not value else key[-2] * (key[-1] / value[-1] + 1)
    return None


def _shape(subject: Subject, op: Op, argument: str, shapes: _Shapes) -> tuple[int, ...] | None:
    binding = next(iter(op.inputs.get(argument, ())), None)
    if isinstance(binding, str) and binding in shapes:
        return shapes[binding]
    kind = subject.argument_type(op, argument)
    return None if kind is None or None in kind.shape else tuple(n or 0 for n in kind.shape)


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
    """Every operation's verdict, and every finding, including findings on the whole program (output "")."""

    rows: tuple[OpVerdict, ...]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")


def judge_package(path: str | Path, target: Target | None = None) -> Verdicts:
    """Return verdicts on a package or compiled bundle. Raises ProgramError if it can't be read."""
    return judge_model(load_model(Path(path)), target or Target())


def judge_model(model: LoadedModel, target: Target) -> Verdicts:
    """Return verdicts on every function of a model."""
    rows: list[OpVerdict] = []
    findings: list[Finding] = []
    for subject in subjects(model, target):
        of_subject = [finding for rule in RULES.values() for finding in rule.findings(subject)]
        rows.extend(op_verdicts(subject, of_subject))
        findings.extend(of_subject)
    return Verdicts(tuple(rows), tuple(findings))


def op_verdicts(subject: Subject, findings: list[Finding]) -> Iterator[OpVerdict]:
    """Yield one verdict per operation of a function, from the findings on it."""
    errors: dict[str, list[str]] = {}
    for finding in findings:
        if finding.severity == "error" and finding.output:
            errors.setdefault(finding.output, []).append(finding.rule)
    for op in subject.ops:
        name = label(op)
        status, rules = _status(op, _of_operation(subject, op, errors))
        yield OpVerdict(subject.function.name, name, op.kind, status, rules)


def _of_operation(subject: Subject, op: Op, errors: dict[str, list[str]]) -> tuple[str, ...]:
    """Return the ids of errors on an operation and on the compressed weights that it takes (W6: the convolution)."""
    ids = list(errors.get(label(op), ()))
    for bindings in op.inputs.values():
        for binding in bindings:
            if isinstance(binding, str) and subject.is_constant(binding):
                ids += errors.get(binding, ())
    return tuple(dict.fromkeys(ids))


def _status(op: Op, errors: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if not has_device(op):
        return "no_device", errors or ("O15",)
    if errors:
        return "ineligible", errors
    return ("eligible" if op.kind in _ELIGIBLE else "unknown"), ()
