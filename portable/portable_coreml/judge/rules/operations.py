"""Rules on operations: what the Neural Engine does not have, and what is said to go wrong."""

from __future__ import annotations

from collections.abc import Iterator

from portable_coreml.judge.rule import Breach, Subject, label, rule
from portable_coreml.judge.rules.shapes import ANEFORGE_QUIRKS, APPLE_RULES, DISPATCH
from portable_coreml.program import Op

_ANEFORGE_OPS = "ANEForge, docs/op-catalog.md"
_UNSUPPORTED = frozenset(
    [
        "lstm",
        "gru",
        "rnn",
        "scatter",
        "scatter_nd",
        "scatter_along_axis",
        "one_hot",
        "non_zero",
        "range_1d",
        "shape",
        "band_part",
        "sliding_windows",
        "reduce_prod",
        "mod",
        "reverse_sequence",
        "asin",
        "acos",
        "tan",
        "sinh",
        "cosh",
        "atanh",
        "acosh",
        "asinh",
    ]
)
_UNSUPPORTED_PREFIXES = ("random_", "list_")
_ORDERING = ("reduce_argmax", "reduce_argmin", "argsort", "topk")
_EFFICIENT_FACTORS = (2, 3, 5)


@rule(
    "O1",
    "error",
    "A",
    "operation that the Neural Engine does not have",
    "rewrite it with supported operations, or compute it on the host",
    DISPATCH,
    _ANEFORGE_OPS,
    "apple/coremltools, converters/mil/frontend/torch/ops.py, issues 337 and 1780",
)
def _unsupported(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind in _UNSUPPORTED or op.kind.startswith(_UNSUPPORTED_PREFIXES) or op.kind == "make_list":
            yield Breach(label(op), f"{op.kind} is not supported on any chip")


@rule(
    "O2",
    "error",
    "B",
    "control flow or data-dependent slice",
    "unroll loops; replace a computed slice by a mask",
    _ANEFORGE_OPS,
    DISPATCH,
)
def _control_flow(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind in ("cond", "while_loop"):
            yield Breach(label(op), f"{op.kind} is control flow")
        elif op.kind in ("slice_by_index", "slice_by_size") and _is_computed(subject, op, "begin"):
            yield Breach(label(op), f"the begin of {op.kind} is computed at run time")


def _is_computed(subject: Subject, op: Op, argument: str) -> bool:
    bound = op.inputs.get(argument, ())
    return any(isinstance(name, str) and not subject.is_constant(name) for name in bound)


@rule(
    "O3",
    "error",
    "B",
    "argmax, argsort or topk indices",
    "return the logits and take the argmax on the host",
    "videlalvaro/ane-book, book/journal/048 and 079",
    "john-rocky/CoreML-LLM, docs/EXPERIMENTS.md",
    "roboflow/rf-detr, pull request 1495",
    contested=(
        "751K lists topk (k = 40, 32000 wide) as supported on M4 with macOS 27; ANEForge from A14, "
        "with k other than 3 and 4"
    ),
)
def _ordering(subject: Subject) -> Iterator[Breach]:
    returned = set(subject.function.block.outputs)
    for op in subject.runtime_ops:
        for name, kind in subject.results(op):
            used = name in returned or name in subject.consumers
            if op.kind in _ORDERING and kind.dtype.startswith(("int", "uint")) and used:
                yield Breach(label(op), f"{op.kind} gives the indices '{name}' ({kind.dtype})")


def _each(subject: Subject, kind: str, why: str) -> Iterator[Breach]:
    """Yield a breach for every operation of a type."""
    return (Breach(label(op), f"{kind}: {why}") for op in subject.runtime_ops if op.kind == kind)


@rule(
    "O5",
    "error",
    "B",
    "gather with run-time indices",
    "look embeddings up on the host",
    DISPATCH,
    "apple/coremltools, issue 1103",
    "hollance/neural-engine, docs/unsupported-layers.md",
)
def _runtime_gather(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind in ("gather", "gather_nd", "gather_along_axis") and _is_computed(subject, op, "indices"):
            yield Breach(label(op), "its indices are computed at run time, as an embedding lookup's are")


@rule(
    "O6",
    "info",
    "A",
    "linear instead of a 1x1 convolution",
    "write projections as nn.Conv2d with kernel 1",
    APPLE_RULES,
    "apple/ml-ane-transformers",
    DISPATCH,
    contested="linear and matmul are eligible on M4 (751K): a preference, not a limit",
)
def _linear(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind == "linear":
            yield Breach(label(op), "a linear operation; a 1x1 convolution is the engine's own projection")


@rule(
    "O7",
    "warn",
    "C",
    "convolution weights computed at run time",
    "make the weights constants, or write a matmul",
    "skyfallsin/apple-neural-engine-field-guide",
    ANEFORGE_QUIRKS,
    chips="M3 Max, private interface",
)
def _computed_weight(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind == "conv" and _is_computed(subject, op, "weight"):
            yield Breach(label(op), "its weights are computed at run time")


@rule(
    "O13",
    "warn",
    "C",
    "slice that starts inside the last axis",
    "slice another axis, or require M4",
    _ANEFORGE_OPS,
    "ANEForge, numeric-cliffs.md",
    chips="M1 to M3",
)
def _last_axis_slice(subject: Subject) -> Iterator[Breach]:
    if subject.target.chip >= 4:
        return
    for op in subject.runtime_ops:
        begin = subject.literal(op, "begin") if op.kind in ("slice_by_index", "slice_by_size") else None
        if begin is not None and begin.size and begin.reshape(-1)[-1] != 0:
            yield Breach(label(op), f"it starts at {begin.reshape(-1)[-1]} on the last axis")


@rule(
    "O14",
    "info",
    "A",
    "stride with a factor other than 2, 3 and 5",
    "choose a stride that is a product of 2, 3 and 5",
    APPLE_RULES,
)
def _strides(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        strides = subject.literal(op, "strides") if op.kind in ("conv", "max_pool", "avg_pool") else None
        for value in [] if strides is None else strides.reshape(-1).tolist():
            if not _has_small_factors(int(value)):
                yield Breach(label(op), f"stride {value} is not a product of 2, 3 and 5")
                break


def _has_small_factors(value: int) -> bool:
    for factor in _EFFICIENT_FACTORS:
        while value > 1 and value % factor == 0:
            value //= factor
    return value == 1


@rule(
    "O4",
    "warn",
    "B",
    "cumsum",
    "multiply by a constant lower-triangular matrix",
    DISPATCH,
    "john-rocky/CoreML-LLM, docs/QWEN35_ROADMAP.md",
)
def _cumsum(subject: Subject) -> Iterator[Breach]:
    return _each(subject, "cumsum", "runs on the CPU through Core ML")


@rule(
    "O8",
    "warn",
    "B",
    "scaled_dot_product_attention",
    "write attention as matmul, softmax, matmul",
    "pytorch/executorch, issue 15833",
    APPLE_RULES,
    "vx-lang/Vx, issue 437",
    systems="macOS 26 and newer",
    contested="751K lists it as eligible at 1x8x128x64",
)
def _fused_attention(subject: Subject) -> Iterator[Breach]:
    return _each(
        subject, "scaled_dot_product_attention", "overflows in fp16 on iOS 26 and is eligible at some sizes only"
    )
