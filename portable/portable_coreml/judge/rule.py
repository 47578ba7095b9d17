"""Placement rules, and what they are checked against: one function of a model.

A rule is data (identity, confidence, scope, sources) and one check over a function. Severities: "error" makes the
operation ineligible for the Neural Engine, or the whole program if the finding names no operation; "warn" and "info"
are reported and decide nothing. Confidence: A = Apple says it; B = measured by two parties, or by one with method and
data; C = one party, one machine; D = contradicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from portable_coreml.files.blob import resolve
from portable_coreml.files.features import Feature, feature_of
from portable_coreml.files.model import LoadedModel, pick_function
from portable_coreml.judge.limits import SYSTEMS
from portable_coreml.program import Function, Op, StateType, TensorType, Value, blobs

SEVERITIES = ("error", "warn", "info")
RULES: dict[str, Rule] = {}  # identity -> rule; importing judge/rules fills it
_NO_DEVICE = frozenset({"const", "read_state"})  # and every constexpr_*: they have no device in a compute plan (O15)


@dataclass(frozen=True)
class Target:
    """The machines that a program is for.

    Attributes:
        chip: the generation of the M-series chip.
        named: systems that somebody asked for: what one of them does not take is an error. Without any, all known
            systems count, and what only some of them take is a warning.
    """

    chip: int = 4
    named: tuple[str, ...] = ()

    @property
    def systems(self) -> tuple[str, ...]:
        """Return the systems that count."""
        return self.named or SYSTEMS


@dataclass(frozen=True, eq=False)
class Subject:
    """One function and its surroundings. `weight_bytes`: size of all weight files that the program refers to."""

    function: Function
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    spec_version: int
    function_count: int
    weight_bytes: int
    target: Target = field(default_factory=Target)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Return every operation, nested blocks included."""
        return tuple(self.function.block.walk())

    @cached_property
    def runtime_ops(self) -> tuple[Op, ...]:
        """Return the operations that run on some device: neither constants nor state reads."""
        return tuple(op for op in self.ops if has_device(op))

    @cached_property
    def states(self) -> Mapping[str, TensorType]:
        return {p.name: p.type.wrapped for p in self.function.inputs if isinstance(p.type, StateType)}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Return tensor type of every value by name, states included."""
        items = [*self.function.inputs, *(out for op in self.ops for out in op.outputs)]
        types = {item.name: item.type for item in items if isinstance(item.type, TensorType)}
        return types | dict(self.states)

    @cached_property
    def producers(self) -> Mapping[str, Op]:
        return {out.name: op for op in self.ops for out in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Op, ...]]:
        consumers: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in input_names(op):
                consumers.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in consumers.items()}

    @cached_property
    def flexible(self) -> bool:
        """Return whether an input has a range of shapes."""
        return any(low != high for f in self.inputs for low, high in f.ranges)

    def is_constant(self, name: str) -> bool:
        op = self.producers.get(name)
        return op is not None and (op.kind == "const" or op.kind.startswith("constexpr_"))

    def operands(self, op: Op) -> Iterator[tuple[str, TensorType]]:
        """Yield (name, type) of an operation's run-time tensor inputs."""
        for name in input_names(op):
            if not self.is_constant(name) and name in self.types:
                yield name, self.types[name]

    def results(self, op: Op) -> Iterator[tuple[str, TensorType]]:
        for out in op.outputs:
            if isinstance(out.type, TensorType):
                yield out.name, out.type

    def literal(self, op: Op, argument: str) -> np.ndarray | None:
        """Return the value of an argument if it is an immediate constant, directly or through a const operation."""
        bindings = op.inputs.get(argument, ())
        value = bindings[0] if bindings else op.attributes.get(argument)
        if isinstance(value, str):
            producer = self.producers.get(value)
            value = producer.attributes.get("val") if producer is not None and producer.kind == "const" else None
        return value.data if isinstance(value, Value) and isinstance(value.data, np.ndarray) else None

    def argument_type(self, op: Op, argument: str) -> TensorType | None:
        """Return the type of an argument, whether it is bound to a name or to a literal."""
        bindings = op.inputs.get(argument, ())
        value = bindings[0] if bindings else op.attributes.get(argument)
        if isinstance(value, str):
            return self.types.get(value)
        return value.type if isinstance(value, Value) and isinstance(value.type, TensorType) else None


def has_device(op: Op) -> bool:
    """Return whether a compute plan names a device for this operation (O15)."""
    return op.kind not in _NO_DEVICE and not op.kind.startswith("constexpr_")


def input_names(op: Op) -> Iterator[str]:
    """Return the names that are bound to an operation's arguments."""
    for bindings in op.inputs.values():
        for binding in bindings:
            if isinstance(binding, str):
                yield binding


def label(op: Op) -> str:
    """Return the name of an operation in findings: its first output, or the state that it writes."""
    if op.outputs:
        return op.outputs[0].name
    written = [binding for binding in op.inputs.get("input", ()) if isinstance(binding, str)]
    return next(iter([*written, *input_names(op)]), op.kind)


def subjects(model: LoadedModel, target: Target) -> Iterator[Subject]:
    """Yield one Subject per function of a model."""
    for name in model.program.functions:
        function, description = pick_function(model, name)
        yield Subject(
            function,
            tuple(feature_of(m) for m in description.input),
            tuple(feature_of(m) for m in description.output),
            model.spec_version,
            len(model.program.functions),
            weight_bytes(model, function),
            target,
        )


def weight_bytes(model: LoadedModel, function: Function) -> int:
    """Return total size of the weight files that a function refers to; files that are missing count nothing."""
    paths = {resolve(blob.path, model.model_dir) for blob in blobs(function)}
    return sum(path.stat().st_size for path in paths if path.is_file())


@dataclass(frozen=True)
class Finding:
    """One breach. `output` is the first output of the operation, or "" for the program as a whole."""

    rule: str
    severity: str
    function: str
    output: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Breach:
    """What a check yields: where and why. `severity` overrides the rule's where the case is milder or worse."""

    output: str
    why: str
    severity: str | None = None


Check = Callable[[Subject], Iterator[Breach]]


@dataclass(frozen=True)
class Rule:
    """One statement about placement that can be checked without a device.

    `sources`: the documents that make the statement, each with the place in the document. `systems`, `chips`: the
    limits of the statement; empty if there is no limit.
    """

    id: str
    severity: str
    confidence: str
    title: str
    remedy: str
    sources: tuple[str, ...]
    check: Check
    systems: str = ""
    chips: str = ""
    contested: str = ""

    def findings(self, subject: Subject) -> Iterator[Finding]:
        """Yield every breach of this rule in one function."""
        for breach in self.check(subject):
            severity = breach.severity or self.severity
            yield Finding(self.id, severity, subject.function.name, breach.output, breach.why, self.remedy)


def rule(
    id: str,
    severity: str,
    confidence: str,
    title: str,
    remedy: str,
    *sources: str,
    systems: str = "",
    chips: str = "",
    contested: str = "",
) -> Callable[[Check], Check]:
    """Register a rule that consists of these data and the decorated check."""

    def register(check: Check) -> Check:
        RULES[id] = Rule(id, severity, confidence, title, remedy, sources, check, systems, chips, contested)
        return check

    return register
