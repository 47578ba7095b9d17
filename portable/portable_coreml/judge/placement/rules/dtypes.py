"""Rules on data types: the Neural Engine computes in fp16."""

from __future__ import annotations

from collections.abc import Iterator

from portable_coreml.judge.placement.rule import Breach, Citation, Rule, Scope
from portable_coreml.judge.placement.rules.shapes import APPLE_RULES, DISPATCH
from portable_coreml.judge.placement.subject import Subject, label

INTEGERS = frozenset({"int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"})
_INDEXED = {"gather": "indices", "gather_along_axis": "indices", "gather_nd": "indices"}


def _fp32_io(subject: Subject) -> Iterator[Breach]:
    for role, features in (("input", subject.inputs), ("output", subject.outputs)):
        for feature in features:
            if feature.dtype in ("fp32", "fp64"):
                yield Breach("", f"{role} '{feature.name}' is {feature.dtype}")
    for op in subject.runtime_ops:
        wide = [name for name, kind in subject.results(op) if kind.dtype in ("fp32", "fp64")]
        if wide and op.kind != "cast":
            yield Breach(label(op), f"'{wide[0]}' is computed in {subject.types[wide[0]].dtype}", "warn")


def _integer_tensors(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for name, kind in [*subject.operands(op), *subject.results(op)]:
            if kind.dtype in INTEGERS:
                yield Breach(label(op), f"'{name}' is {kind.dtype}")
                break


def _integer_inputs(subject: Subject) -> Iterator[Breach]:
    for feature in subject.inputs:
        if feature.dtype == "int32" and _reaches_an_index(subject, feature.name):
            yield Breach("", f"input '{feature.name}' is int32 and selects rows inside the program")


def _reaches_an_index(subject: Subject, name: str) -> bool:
    seen, frontier = set(), [name]
    while frontier:
        current = frontier.pop()
        for op in subject.consumers.get(current, ()):
            if op.kind.startswith("gather") or op.kind in ("slice_by_index", "slice_by_size", "slice_update"):
                return True
            for out, kind in subject.results(op):
                if kind.dtype in INTEGERS and out not in seen:
                    seen.add(out)
                    frontier.append(out)
    return False


def _gather_index_type(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for name in op.inputs.get(_INDEXED.get(op.kind, ""), ()):
            if isinstance(name, str) and not subject.is_constant(name) and subject.types[name].dtype != "uint16":
                yield Breach(label(op), f"its run-time indices '{name}' are {subject.types[name].dtype}")


RULES = (
    Rule(
        "T1",
        "error",
        "fp32 input or output",
        "declare inputs and outputs fp16 (ct.TensorType(dtype=np.float16)) and convert with fp16 compute precision",
        _fp32_io,
        "A",
        (
            APPLE_RULES,
            Citation("pytorch/executorch", "docs/source/backends/coreml/coreml-partitioner.md"),
            Citation("hollance/neural-engine", "docs/16-bit.md"),
        ),
        contested="fp32 values inside a program, reached through casts, are reported to compile (ANEForge, 751K): "
        "a warning there",
    ),
    Rule(
        "T2",
        "error",
        "integer or boolean tensor at run time",
        "compute it on the host and pass the result as fp16",
        _integer_tensors,
        "B",
        (DISPATCH, Citation("anemll-profile", "README"), Citation("john-rocky/CoreML-LLM", "docs/ARCHITECTURE.md")),
        Scope("macOS 15 to 27", "M-series"),
    ),
    Rule(
        "T3",
        "error",
        "token ids or positions select rows inside the program",
        "look rows up on the host; pass RoPE rows, masks and one-hot write masks as fp16 inputs",
        _integer_inputs,
        "A",
        (
            APPLE_RULES,
            Citation("videlalvaro/ane-book", "book/ch04"),
            Citation("john-rocky/CoreML-LLM", "docs/ARCHITECTURE.md"),
        ),
    ),
    Rule(
        "T4",
        "warn",
        "gather indices are not uint16",
        "if a gather must stay, give it uint16 indices",
        _gather_index_type,
        "C",
        (Citation("ANE compiler", 'message "Unsupported gather index type"'),),
        Scope("iOS 18 and newer, coremltools 8.2 and newer"),
    ),
)
