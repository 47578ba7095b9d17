"""Rules on data types and arithmetic: the Neural Engine computes in fp16, and some results less exactly still."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from portable_coreml.judge.rule import Breach, Subject, input_names, label, rule
from portable_coreml.judge.rules.shapes import APPLE_RULES, DISPATCH
from portable_coreml.program import Op

INTEGERS = frozenset({"int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"})
_INDEXED = {"gather": "indices", "gather_along_axis": "indices", "gather_nd": "indices"}


@rule(
    "T1",
    "error",
    "A",
    "fp32 input or output",
    "declare inputs and outputs fp16 (ct.TensorType(dtype=np.float16)) and convert with fp16 compute precision",
    APPLE_RULES,
    "pytorch/executorch, docs/source/backends/coreml/coreml-partitioner.md",
    "hollance/neural-engine, docs/16-bit.md",
    contested=(
        "fp32 values inside a program, reached through casts, are reported to compile (ANEForge, 751K): a warning there"
    ),
)
def _fp32_io(subject: Subject) -> Iterator[Breach]:
    for role, features in (("input", subject.inputs), ("output", subject.outputs)):
        for feature in features:
            if feature.dtype in ("fp32", "fp64"):
                yield Breach("", f"{role} '{feature.name}' is {feature.dtype}")
    for op in subject.runtime_ops:
        wide = [name for name, kind in subject.results(op) if kind.dtype in ("fp32", "fp64")]
        if wide and op.kind != "cast":
            yield Breach(label(op), f"'{wide[0]}' is computed in {subject.types[wide[0]].dtype}", "warn")


@rule(
    "T2",
    "error",
    "B",
    "integer or boolean tensor at run time",
    "compute it on the host and pass the result as fp16",
    DISPATCH,
    "anemll-profile, README",
    "john-rocky/CoreML-LLM, docs/ARCHITECTURE.md",
    systems="macOS 15 to 27",
    chips="M-series",
)
def _integer_tensors(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for name, kind in [*subject.operands(op), *subject.results(op)]:
            if kind.dtype in INTEGERS:
                yield Breach(label(op), f"'{name}' is {kind.dtype}")
                break


@rule(
    "T3",
    "error",
    "A",
    "token ids or positions select rows inside the program",
    "look rows up on the host; pass RoPE rows, masks and one-hot write masks as fp16 inputs",
    APPLE_RULES,
    "videlalvaro/ane-book, book/ch04",
    "john-rocky/CoreML-LLM, docs/ARCHITECTURE.md",
)
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


@rule(
    "T4",
    "warn",
    "C",
    "gather indices are not uint16",
    "if a gather must stay, give it uint16 indices",
    'ANE compiler, message "Unsupported gather index type"',
    systems="iOS 18 and newer, coremltools 8.2 and newer",
)
def _gather_index_type(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for name in op.inputs.get(_INDEXED.get(op.kind, ""), ()):
            if isinstance(name, str) and not subject.is_constant(name) and subject.types[name].dtype != "uint16":
                yield Breach(label(op), f"its run-time indices '{name}' are {subject.types[name].dtype}")


M6 = "751K, M6 report at 0dccf2e, notes/numerics.md"


@rule(
    "N1",
    "info",
    "B",
    "products are added in fixed point",
    "keep sums under 32768 and their terms well over 2^-16: scale a factor before the product and back after it",
    f"{M6} and notes/defects.md, C2 and C4",
    "ANEForge, numeric-cliffs.md",
    chips="M4 and M6",
    contested="a summary by Bryngelson says that M5 does not saturate",
)
def _fixed_point(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all products of a function."""
    products = [op for op in subject.runtime_ops if op.kind in ("conv", "linear", "matmul")]
    if products:
        yield Breach(label(products[0]), f"product, {len(products)} in this function; this is the first")


@rule(
    "N2",
    "warn",
    "B",
    "squares of unbounded values are added up",
    "divide by the largest magnitude first: the square of a number over 256 is infinite in fp16",
    "apple/coremltools, converters/mil/frontend/torch/ops.py, rms_norm",
    "videlalvaro/ane-book",
    "Anemll, qwen_model.py",
    "computed by lab/norms.py, with sums in fp16: the squares of 710 to 2000 that are reported of EmbeddingGemma 2 "
    "are infinite as a sum over 768 channels, and the cosine of such a row is 0; it is 1.000000 if it is divided first",
)
def _squares(subject: Subject) -> Iterator[Breach]:
    """Yield the sums of squares of values that were not divided before: a quotient has a bound, other values none."""
    for op in subject.runtime_ops:
        if op.kind in ("reduce_sum_square", "reduce_l2_norm"):
            squared = next(iter(input_names(op)), "")
        elif op.kind in ("reduce_mean", "reduce_sum"):
            maker = subject.producers.get(next(iter(input_names(op)), ""))
            squared = _squared(maker) if maker else ""
        else:
            continue
        maker = subject.producers.get(squared)
        if squared and (maker is None or maker.kind != "real_div"):
            yield Breach(label(op), f"it adds up squares of '{squared}'")


def _squared(op: Op) -> str:
    """Return the value whose square an operation computes; "" if it computes none."""
    names = [name for argument in ("x", "y") for name in op.inputs.get(argument, ()) if isinstance(name, str)]
    is_square = op.kind == "square" or (op.kind == "mul" and len(names) == 2 and names[0] == names[1])
    return names[0] if is_square else ""


@rule(
    "N4",
    "warn",
    "A",
    "infinite mask value",
    "mask with -1e4 (or -4e4): the engine's softmax does not handle infinities",
    APPLE_RULES,
    "apple/ml-ane-transformers, transformer.py",
)
def _infinite_mask(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for argument in ("x", "y", "a", "b") if op.kind in ("add", "select", "mul") else ():
            value = subject.literal(op, argument)
            if value is not None and value.dtype.kind == "f" and bool(np.isinf(value).any()):
                yield Breach(label(op), "it adds or selects an infinite constant")
                break


@rule(
    "N5",
    "info",
    "C",
    "SiLU is read from a table",
    "0.5 * x * (1 + tanh(x / 2)) has the same values and is reported to halve the error; measure it on the device",
    "Anemll/anemll-forge, ANE_DELTANET_NUMERICS.md at 117ded6, FEEDBACK and TECHNIQUES.md",
    "751K, M6 report at 0dccf2e, C6 and chapter 8",
)
def _table_of_silu(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all of a function's SiLUs: a model has one in every layer."""
    silus = [op for op in subject.runtime_ops if op.kind == "silu" or _is_silu(subject, op)]
    if silus:
        yield Breach(label(silus[0]), f"SiLU, {len(silus)} in this function; this is the first")


def _is_silu(subject: Subject, op: Op) -> bool:
    """Return whether an operation multiplies a value by its sigmoid, which the compiler turns into `silu`."""
    if op.kind != "mul":
        return False
    factors = {name for argument in ("x", "y") for name in op.inputs.get(argument, ()) if isinstance(name, str)}
    makers = [subject.producers[name] for name in factors if name in subject.producers]
    return any(factors & set(input_names(maker)) for maker in makers if maker.kind == "sigmoid")


@rule(
    "N6",
    "info",
    "C",
    "small probabilities lose precision in a product",
    "multiply the probabilities by 64 before the product and divide the product by 64",
    "cadamcat/llms-on-apple-neural-engine, attention-product-precision",
    "Anemll/anemll-forge",
)
def _small_probabilities(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all products of a softmax and a matrix in a function."""
    softmax = {out.name for op in subject.runtime_ops if op.kind == "softmax" for out in op.outputs}
    products = [op for op in subject.runtime_ops if op.kind == "matmul" and softmax & set(input_names(op))]
    if products:
        yield Breach(label(products[0]), f"product with a softmax, {len(products)} in this function; this is the first")


@rule(
    "N9",
    "info",
    "C",
    "activation is read from a table of 33 numbers",
    "expect errors of 3e-3 for sigmoid, 2e-3 for tanh and 6e-3 for gelu, whose two modes share one table",
    f"{M6}, F3 and F3b",
    chips="M6",
)
def _tables(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all of a function's operations that are read from a table, except SiLU."""
    ops = [op for op in subject.runtime_ops if op.kind in ("erf", "gelu", "sigmoid", "tanh")]
    if ops:
        yield Breach(label(ops[0]), f"{ops[0].kind}, {len(ops)} of a table in this function; this is the first")
