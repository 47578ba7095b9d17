"""Rules on arithmetic of the Neural Engine that is less exact than fp16, whatever the placement."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from portable_coreml.judge.placement.rule import Breach, Citation, Rule, Scope
from portable_coreml.judge.placement.rules.shapes import APPLE_RULES
from portable_coreml.judge.placement.subject import Subject, input_names, label
from portable_coreml.program import Op


def _infinite_mask(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for argument in ("x", "y", "a", "b") if op.kind in ("add", "select", "mul") else ():
            value = subject.literal(op, argument)
            if value is not None and value.dtype.kind == "f" and bool(np.isinf(value).any()):
                yield Breach(label(op), "it adds or selects an infinite constant")
                break


def _table_of_silu(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all of a function's SiLUs: a model has one in every layer."""
    found = [op for op in subject.runtime_ops if op.kind == "silu" or _is_silu(subject, op)]
    if found:
        yield Breach(label(found[0]), f"SiLU, {len(found)} in this function; this is the first")


def _is_silu(subject: Subject, op: Op) -> bool:
    """Return whether an operation multiplies a value by its sigmoid, which the compiler turns into `silu`."""
    if op.kind != "mul":
        return False
    factors = {name for argument in ("x", "y") for name in op.inputs.get(argument, ()) if isinstance(name, str)}
    makers = [subject.producers[name] for name in factors if name in subject.producers]
    return any(factors & set(input_names(maker)) for maker in makers if maker.kind == "sigmoid")


def _small_probabilities(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all products of a softmax and a matrix in a function."""
    softmax = {out.name for op in subject.runtime_ops if op.kind == "softmax" for out in op.outputs}
    found = [op for op in subject.runtime_ops if op.kind == "matmul" and softmax & set(input_names(op))]
    if found:
        yield Breach(label(found[0]), f"product with a softmax, {len(found)} in this function; this is the first")


def _fixed_point(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all products of a function."""
    found = [op for op in subject.runtime_ops if op.kind in ("conv", "linear", "matmul")]
    if found:
        yield Breach(label(found[0]), f"product, {len(found)} in this function; this is the first")


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


def _tables(subject: Subject) -> Iterator[Breach]:
    """Yield one breach for all of a function's operations that are read from a table, except SiLU."""
    found = [op for op in subject.runtime_ops if op.kind in ("erf", "gelu", "sigmoid", "tanh")]
    if found:
        yield Breach(label(found[0]), f"{found[0].kind}, {len(found)} of a table in this function; this is the first")


M6 = "751K"  # Apple-Neural-Engine-Microarchitecture-Study-M6
RULES = (
    Rule(
        "N1",
        "info",
        "products are added in fixed point",
        "keep sums under 32768 and their terms well over 2^-16: scale a factor before the product and back after it",
        _fixed_point,
        "B",
        (
            Citation(M6, "M6 report at 0dccf2e, notes/numerics.md and notes/defects.md, C2 and C4"),
            Citation("ANEForge", "numeric-cliffs.md"),
        ),
        Scope(chips="M4 and M6"),
        contested="a summary by Bryngelson says that M5 does not saturate",
    ),
    Rule(
        "N2",
        "warn",
        "squares of unbounded values are added up",
        "divide by the largest magnitude first: the square of a number over 256 is infinite in fp16",
        _squares,
        "B",
        (
            Citation("apple/coremltools", "converters/mil/frontend/torch/ops.py, rms_norm"),
            Citation("videlalvaro/ane-book"),
            Citation("Anemll", "qwen_model.py"),
        ),
    ),
    Rule(
        "N9",
        "info",
        "activation is read from a table of 33 numbers",
        "expect errors of 3e-3 for sigmoid, 2e-3 for tanh and 6e-3 for gelu, whose two modes share one table",
        _tables,
        "C",
        (Citation(M6, "M6 report at 0dccf2e, notes/numerics.md, F3 and F3b"),),
        Scope(chips="M6"),
    ),
    Rule(
        "N5",
        "info",
        "SiLU is read from a table",
        "0.5 * x * (1 + tanh(x / 2)) has the same values and is reported to halve the error; measure it on the device",
        _table_of_silu,
        "C",
        (
            Citation("Anemll/anemll-forge", "ANE_DELTANET_NUMERICS.md at 117ded6, FEEDBACK and TECHNIQUES.md"),
            Citation("751K", "M6 report at 0dccf2e, C6 and chapter 8"),
        ),
    ),
    Rule(
        "N6",
        "info",
        "small probabilities lose precision in a product",
        "multiply the probabilities by 64 before the product and divide the product by 64",
        _small_probabilities,
        "C",
        (
            Citation("cadamcat/llms-on-apple-neural-engine", "attention-product-precision"),
            Citation("Anemll/anemll-forge"),
        ),
    ),
    Rule(
        "N4",
        "warn",
        "infinite mask value",
        "mask with -1e4 (or -4e4): the engine's softmax does not handle infinities",
        _infinite_mask,
        "A",
        (APPLE_RULES, Citation("apple/ml-ane-transformers", "transformer.py")),
    ),
)
