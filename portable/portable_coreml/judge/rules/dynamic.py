"""Rules on flexible shapes."""

from __future__ import annotations

from collections.abc import Iterator

from portable_coreml.judge.rule import Breach, Subject, label, rule

_FLEXIBLE_DOC = "apple/coremltools, docs-guides/source/flexible-inputs.md"
_MAX_CHOICES = 128
_FIRST_MANY_ENUMERATED_SPEC = 9


@rule("D1", "error", "A", "range without an upper bound", "give every RangeDim an upper_bound", _FLEXIBLE_DOC)
def _unbounded(subject: Subject) -> Iterator[Breach]:
    for feature in subject.inputs:
        if any(high is None for _, high in feature.ranges):
            yield Breach("", f"input '{feature.name}' has a range without an upper bound")


@rule(
    "D2",
    "info",
    "D",
    "range of shapes",
    "prove residency on a Mac for every width in use, or emit one fixed-shape program per width",
    _FLEXIBLE_DOC,
    "pytorch/executorch, docs/source/backends/coreml/coreml-partitioner.md",
    contested=(
        "Apple's guidance and coremltools issue 2370 say that ranges leave the engine at "
        "other shapes than the default; "
        "videlalvaro/ane-book (experiments 26, 28, 34) measured RangeDim(1..4) fully resident"
    ),
)
def _any_range(subject: Subject) -> Iterator[Breach]:
    names = [f.name for f in subject.inputs if any(low != high for low, high in f.ranges)]
    if names:
        yield Breach("", f"the inputs {', '.join(names)} have a range of shapes")


@rule(
    "D3",
    "error",
    "B",
    "stateful program with fixed and flexible inputs",
    "let every input carry the same RangeDim",
    "apple/coremltools, issue 2548",
    systems="macOS 15 to 26",
)
def _mixed_inputs(subject: Subject) -> Iterator[Breach]:
    if not (subject.states and subject.flexible):
        return
    for feature in subject.inputs:
        if not any(low != high for low, high in feature.ranges):
            yield Breach("", f"input '{feature.name}' has a fixed shape beside inputs with ranges")


@rule(
    "D4",
    "error",
    "C",
    "int32 input in a stateful program with ranges",
    "pass it as fp16",
    "apple/coremltools, issue 2500",
    systems="macOS 15",
)
def _integer_range(subject: Subject) -> Iterator[Breach]:
    if subject.states and subject.flexible:
        for feature in subject.inputs:
            if feature.dtype == "int32":
                yield Breach("", f"input '{feature.name}' is int32 in a stateful program with ranges")


@rule(
    "D5",
    "error",
    "C",
    "enumerated shapes in a stateful program",
    "use RangeDim, or one fixed-shape program per width",
    "videlalvaro/ane-book, experiment 26",
    systems="macOS 26",
    chips="M4 Max",
)
def _enumerated_with_states(subject: Subject) -> Iterator[Breach]:
    for feature in subject.inputs:
        if subject.states and feature.choices:
            yield Breach("", f"input '{feature.name}' has enumerated shapes in a stateful program")


@rule(
    "D6",
    "warn",
    "C",
    "enumerated shapes with layer_norm",
    "use RangeDim or a fixed shape",
    "apple/coremltools, issue 1909",
    systems="macOS 13 and 14",
)
def _enumerated_layer_norm(subject: Subject) -> Iterator[Breach]:
    if any(f.choices for f in subject.inputs):
        for op in subject.runtime_ops:
            if op.kind == "layer_norm":
                yield Breach(label(op), "layer_norm in a program with enumerated shapes")


@rule(
    "D7",
    "error",
    "A",
    "more enumerated shapes than Core ML takes",
    "at most 128 shapes; before iOS 18 on one input only",
    _FLEXIBLE_DOC,
)
def _enumerated_limits(subject: Subject) -> Iterator[Breach]:
    enumerated = [f for f in subject.inputs if f.choices]
    for feature in enumerated:
        if len(feature.choices) > _MAX_CHOICES:
            yield Breach("", f"input '{feature.name}' has {len(feature.choices)} enumerated shapes")
    if len(enumerated) > 1 and subject.spec_version < _FIRST_MANY_ENUMERATED_SPEC:
        yield Breach("", f"{len(enumerated)} inputs have enumerated shapes before iOS 18")


@rule(
    "D8",
    "error",
    "C",
    "multifunction program with ranges",
    "keep each flexible function in a separate package",
    "kasper0406/gemma-coreml-chat, benchmarks/multifunction_rangedim_bug.py",
    'ANE compiler, message "ANEC doesn\'t support MIL program with RangeDims and multi-functions"',
    systems="macOS 15 and 26",
    contested=(
        "without the engine such a model loads and predicts "
        "(rebeckerspecialties/mlmodelc-export, tests/runtime_shapes.swift)"
    ),
)
def _multifunction_range(subject: Subject) -> Iterator[Breach]:
    if subject.function_count > 1 and subject.flexible:
        yield Breach("", f"one of {subject.function_count} functions has a range of shapes")


@rule(
    "D9",
    "warn",
    "A",
    "shape computed at run time",
    "reshape with one -1 and constants instead of computed shapes",
    "apple/coremltools, docs-guides/source/faqs.md",
)
def _dynamic_reshape(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        bound = op.inputs.get("shape", ())
        computed = any(isinstance(name, str) and not subject.is_constant(name) for name in bound)
        if op.kind == "shape" or (op.kind in ("reshape", "fill") and computed):
            yield Breach(label(op), f"{op.kind} makes shapes at run time")
