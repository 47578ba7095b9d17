"""Rules on ranks, extents and the alignment of the last axis."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ProgramError
from portable_coreml.judge.limits import LONG_PASS, WRONG_LENGTHS, strictest
from portable_coreml.judge.rule import Breach, Subject, label, rule

MAX_EXTENT = 65536
STATE_WIDTH_MULTIPLE = 32
MAX_OUTPUT_CHANNELS = 16384  # of one projection, by the strictest report


APPLE_RULES = "apple/coreai-models, skills/skills/model-authoring/references/neural_engine_rules.md"
ANEFORGE_QUIRKS = "ANEForge, docs/developer/op-quirks.md"
_ANEFORGE_CAPS = "ANEForge, docs/capabilities.md"
DISPATCH = "751K, notes/coreml_dispatch.md"

_MAX_RANK = 5
_TOKENS_AXES = 4  # of an input with a token in each place of its third axis
MAX_SPATIAL_BEFORE_M4 = 16384
_MAX_CONTRACTION = 32768
_ALIGNMENT_BYTES = 64
_FIRST_WIDE_CHIP = 4
_COMPUTE = frozenset({"conv", "matmul", "linear", "scaled_dot_product_attention", "softmax", "layer_norm"})


@rule(
    "S1",
    "error",
    "A",
    "tensor rank over 5",
    "reshape to at most 5 axes; 4 (N, C, H, W) is what the engine computes in",
    APPLE_RULES,
    ANEFORGE_QUIRKS,
    DISPATCH,
)
def _rank_over_five(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for name, kind in [*subject.operands(op), *subject.results(op)]:
            if len(kind.shape) > _MAX_RANK:
                yield Breach(label(op), f"'{name}' has rank {len(kind.shape)}")
                break


@rule(
    "S2",
    "warn",
    "B",
    "compute operation on rank 5",
    "keep compute operations at rank 4 or less",
    "Anemll, agent.md",
    "john-rocky/CoreML-LLM, docs/QWEN35_NEXT_SESSION.md",
    "pytorch/executorch, examples/apple/coreml/llama/readme.md",
    systems="iOS 18 to 26",
    chips="M-series",
)
def _rank_five_compute(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind in _COMPUTE and any(len(kind.shape) == _MAX_RANK for _, kind in subject.operands(op)):
            yield Breach(label(op), f"{op.kind} works on a tensor of rank 5")


@rule(
    "S3",
    "error",
    "B",
    "an extent over 65536",
    "split the axis; a vocabulary is split into parts of at most 65536",
    DISPATCH,
    _ANEFORGE_CAPS,
    "maderix/ANE, pull request 26",
    contested=(
        "output channels of a 1x1 convolution over 65536 are reported resident (videlalvaro/ane-book, "
        "journal 048; "
        "john-rocky/CoreML-LLM, LMSPLIT_FINALISE), so there it is a warning"
    ),
)
def _extent_over_limit(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for name, kind in [*subject.operands(op), *subject.results(op)]:
            large = [axis for axis, n in enumerate(kind.shape) if n is not None and n > MAX_EXTENT]
            if large:
                channels = large == [1] and _is_pointwise_product(subject, name)
                yield Breach(
                    label(op), f"'{name}' has an extent of {kind.shape[large[0]]}", "warn" if channels else None
                )
                break


def _is_pointwise_product(subject: Subject, name: str) -> bool:
    """Return whether a value is the result of a 1x1 convolution, whose output channels Core ML may tile itself."""
    op = subject.producers.get(name)
    weight = None if op is None or op.kind != "conv" else subject.argument_type(op, "weight")
    return weight is not None and all(n == 1 for n in weight.shape[2:])


@rule(
    "S4",
    "info",
    "B",
    "height or width over 16384",
    "before M4 the limit is 16384: split the axis, or require M4",
    _ANEFORGE_CAPS,
    "751K, notes/hal_analysis.md",
    "microsoft/onnxruntime, issue 19543",
    chips="M1 to M3: 16384; M4 and newer: 65536",
)
def _spatial_over_limit(subject: Subject) -> Iterator[Breach]:
    severity = "error" if subject.target.chip < _FIRST_WIDE_CHIP else "info"
    for op in subject.runtime_ops:
        for name, kind in subject.results(op):
            if any(n is not None and n > MAX_SPATIAL_BEFORE_M4 for n in kind.shape[2:]):
                yield Breach(label(op), f"'{name}' has a height or width over {MAX_SPATIAL_BEFORE_M4}", severity)


@rule(
    "S5",
    "error",
    "C",
    "matmul contraction over 32768",
    "split the contraction and add the parts",
    DISPATCH,
    systems="macOS 27",
    chips="M4",
)
def _long_contraction(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        kind = subject.argument_type(op, "x") if op.kind in ("matmul", "linear") else None
        if kind is None or not kind.shape:
            continue
        flag = subject.literal(op, "transpose_x")
        inner = kind.shape[-2] if flag is not None and bool(flag) and len(kind.shape) > 1 else kind.shape[-1]
        if inner is not None and inner > _MAX_CONTRACTION:
            yield Breach(label(op), f"the contraction is {inner} long")


@rule(
    "S7",
    "warn",
    "A",
    "last axis of an input or output is not a multiple of 64 bytes",
    "put an axis of at least 32 fp16 values last, or accept the padding",
    APPLE_RULES,
    "Apple, machinelearning.apple.com/research/neural-engine-transformers",
)
def _unaligned_io(subject: Subject) -> Iterator[Breach]:
    for feature in [*subject.inputs, *subject.outputs]:
        width = feature.shape[-1] if feature.shape else 0
        if width and width * BY_NAME[feature.dtype].bits // 8 % _ALIGNMENT_BYTES:
            yield Breach(
                "", f"'{feature.name}' has a last axis of {width} {feature.dtype} values, which is padded to 64 bytes"
            )


@rule(
    "S9",
    "warn",
    "C",
    "attention scores of 2^20 elements or more",
    "split the queries, so that fewer are multiplied by the keys at once",
    "eeANE 2.1.0, eeane/attention_split.py",
    systems="macOS 27",
    chips="M2",
)
def _many_scores(subject: Subject) -> Iterator[Breach]:
    most = strictest(subject.target.systems).scores.most
    softmaxes = [op for op in subject.runtime_ops if op.kind == "softmax"]
    shapes = _largest_shapes(subject) if softmaxes else {}
    for op in softmaxes:
        rows = [shapes.get(name, ())[-2:] for name, _ in subject.operands(op)]
        if (count := max(map(prod, rows), default=0)) > most:
            yield Breach(label(op), f"softmax over {count} scores of one product; the engine computes them wrongly")


def _largest_shapes(subject: Subject) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a function's values for the largest inputs that it takes; empty if they can't be told."""
    from portable_coreml.judge.shapes import infer_shapes  # with torch, which most rules do without

    largest = {f.name: [high or 1 for _, high in f.ranges] for f in subject.inputs if f.ranges}
    largest |= {f.name: [*max(f.choices, key=prod)] for f in subject.inputs if f.choices}
    if not largest:
        known = ((name, kind.shape) for name, kind in subject.types.items())
        return {name: tuple(n or 0 for n in shape) for name, shape in known}
    try:
        return infer_shapes(subject.function, largest)
    except ProgramError:  # which another rule names
        return {}


def _tokens(subject: Subject) -> int:
    """Return the tokens of a pass of an encoder, which has no states and takes [1, channels, tokens, 1]; else 0."""
    shapes = [feature.shape for feature in subject.inputs if not feature.ranges and not feature.choices]
    counts = [shape[2] for shape in shapes if len(shape) == _TOKENS_AXES and shape[0] == shape[3] == 1]
    attends = any(op.kind == "softmax" for op in subject.runtime_ops)
    return max(counts, default=0) if attends and not subject.states else 0


@rule(
    "S11",
    "info",
    "C",
    "encoder of 501 to 512 tokens",
    "take 520 tokens, or 500: the model of this report is right there",
    "eeANE 2.1.0, EmbeddingGemma 2",
    systems="macOS 27",
    chips="M2",
    contested=(
        "one model of one party, with a sliding window on both sides: cosines of 0.93 to 0.96, or NaN; that it holds "
        "for other encoders is inferred"
    ),
)
def _wrong_lengths(subject: Subject) -> Iterator[Breach]:
    if (tokens := _tokens(subject)) in WRONG_LENGTHS:
        yield Breach("", f"a pass has {tokens} tokens")


@rule(
    "S12",
    "warn",
    "C",
    "encoder of 2048 tokens or more",
    "take 1024 tokens at most, and divide longer texts",
    "eeANE 2.1.0, EmbeddingGemma 2",
    systems="macOS 27",
    chips="M2",
)
def _too_long(subject: Subject) -> Iterator[Breach]:
    if (tokens := _tokens(subject)) >= LONG_PASS:
        yield Breach("", f"a pass has {tokens} tokens; with 2048, no operation ran on the Neural Engine")


@rule(
    "S8",
    "error",
    "B",
    "state width is not a multiple of 32",
    "pad the state's last axis to a multiple of 32",
    "apple/coremltools, issue 2631",
    systems="macOS 15 and newer",
    chips="M4",
)
def _unaligned_state(subject: Subject) -> Iterator[Breach]:
    for name, kind in subject.states.items():
        width = kind.shape[-1] if kind.shape else None
        if width is not None and width % STATE_WIDTH_MULTIPLE:
            yield Breach("", f"state '{name}' is {width} wide")
