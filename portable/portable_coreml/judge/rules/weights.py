"""Rules on weights: their size, their compression, the shape of their scales, and the width of the head."""

from __future__ import annotations

from collections.abc import Iterator

from portable_coreml.judge.limits import MIN_WEIGHT_BYTES, SPLIT, Limit, heeded, limits, listed, loosest
from portable_coreml.judge.rule import Breach, Subject, label, rule
from portable_coreml.judge.rules.shapes import MAX_OUTPUT_CHANNELS

_LARGE_WEIGHT_BYTES = 1_400_000_000
_QUANTIZATION_DOC = "apple/coremltools, docs-guides/source/opt-quantization-perf.md"


def _size(count: int) -> str:
    """Return a number of bytes for people."""
    if count < 1_000_000:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1_000_000_000 else f"{count / 1e9:.2f} GB"


def _over(subject: Subject, rule_id: str) -> Iterator[Breach]:
    """Yield a breach for each limit of a rule that the weights exceed on systems of the target.

    It is an error if no system takes so much, or if somebody asked for one that doesn't.
    """
    by_limit: dict[Limit, list[str]] = {}
    for name in subject.target.systems:
        by_limit.setdefault(limits(name).weight_bytes, []).append(name)
    for limit, systems in by_limit.items():
        if limit.rule == rule_id and subject.weight_bytes > limit.most:
            sure = subject.target.named or subject.weight_bytes > loosest().weight_bytes.most
            said = f" (confidence {limit.confidence}: {limit.sources[-1]})" if limit in heeded() else ""
            taken = f"{listed(systems)} takes {_size(limit.most)}{said}"
            yield Breach("", f"the weights take {_size(subject.weight_bytes)}; {taken}", None if sure else "warn")


@rule(
    "W1",
    "error",
    "A",
    "weights over what macOS takes",
    "split the layers over more programs",
    "apple/coremltools, pull request 2593, issue 1807",
    "smpanaro/coreml-llm-cli, chunk_model.py",
    SPLIT,
    systems="macOS",
)
def _file_too_large(subject: Subject) -> Iterator[Breach]:
    yield from _over(subject, "W1")


@rule(
    "W2",
    "error",
    "A",
    "weights over what iOS takes",
    "split the layers over more programs",
    "apple/coremltools, docs-guides/source/mlmodel-utilities.md",
    "apple/ml-stable-diffusion, README",
    systems="iOS",
    contested="coremltools pull request 2593 says 2 GB for iOS 18 too",
)
def _file_too_large_for_ios(subject: Subject) -> Iterator[Breach]:
    yield from _over(subject, "W2")


@rule(
    "W3",
    "info",
    "D",
    "weights over 1.4 GB",
    "if the program falls off the engine, split it",
    "john-rocky/CoreML-LLM, docs/DECODE_STATE_LAYOUTS.md",
    contested="a 2.0 GB program is reported resident (videlalvaro/ane-book, experiment 26)",
)
def _large_file(subject: Subject) -> Iterator[Breach]:
    if _LARGE_WEIGHT_BYTES < subject.weight_bytes <= loosest().weight_bytes.most:
        yield Breach("", f"the weights take {_size(subject.weight_bytes)}")


@rule(
    "W5",
    "warn",
    "B",
    "weights under 14 MB",
    "expect the CPU: eligible is not chosen, and a small graph does not earn its dispatch",
    "videlalvaro/ane-book, experiment 27",
    "751K, notes/coreml_dispatch.md",
    "vx-lang/Vx, issue 436",
    systems="macOS 26 and 27",
    chips="M4",
)
def _small_file(subject: Subject) -> Iterator[Breach]:
    if subject.weight_bytes < MIN_WEIGHT_BYTES:
        size = _size(subject.weight_bytes) if subject.weight_bytes else "no file"
        yield Breach("", f"the weights take {size}: too little work to win back the dispatch")


@rule(
    "W6",
    "error",
    "A",
    "scales vary along the reduction axis",
    "quantise per output channel or per tensor, not per block",
    'ANE compiler, message "ANE only support per-cout/per-tensor quantization"',
    "cadamcat/llms-on-apple-neural-engine, findings/coreml-grouped-scale-cpu",
    "apple/coreai-models, issue 279",
    _QUANTIZATION_DOC,
    systems="iOS 18 and newer",
)
def _blockwise_scales(subject: Subject) -> Iterator[Breach]:
    for op in subject.ops:
        if "shift_scale" not in op.kind:
            continue
        scale = subject.argument_type(op, "scale")
        if scale is not None and any(n not in (None, 1) for n in scale.shape[1:]):
            yield Breach(label(op), f"its scale of shape {list(scale.shape)} varies along the reduction axis")


@rule(
    "W8",
    "info",
    "D",
    "signed int8 affine weights",
    "verify the numbers on the device, or convert for iOS 18",
    "apple/coremltools, pull request 2675, not merged",
    systems="iOS 16 and 17",
    contested="one unmerged pull request says GPU and engine mishandle it",
)
def _signed_affine(subject: Subject) -> Iterator[Breach]:
    for op in subject.ops:
        data = subject.argument_type(op, "quantized_data") if op.kind == "constexpr_affine_dequantize" else None
        if data is not None and data.dtype == "int8":
            yield Breach(label(op), "signed int8 data in constexpr_affine_dequantize")


@rule(
    "W10",
    "error",
    "C",
    "lookup table of integers",
    "keep the lookup table in fp16 (no joint compression)",
    "john-rocky/CoreML-LLM, ROUND8 probe",
)
def _integer_lut(subject: Subject) -> Iterator[Breach]:
    for op in subject.ops:
        table = subject.argument_type(op, "lut") if op.kind.startswith("constexpr_lut") else None
        if table is not None and table.dtype in ("int8", "uint8"):
            yield Breach(label(op), f"its lookup table holds {table.dtype} values")


@rule(
    "W9",
    "info",
    "C",
    "palettized weights",
    "prefer int8 per output channel until this works on the device in question",
    "apple/coremltools, issue 2716",
    "videlalvaro/ane-book, experiment 35",
)
def _palettized(subject: Subject) -> Iterator[Breach]:
    for op in subject.ops:
        if op.kind.startswith("constexpr_lut"):
            yield Breach("", "weights are palettized")
            return


@rule(
    "L1",
    "info",
    "B",
    "projection to more than 16384 channels",
    "the strict choice is slices of 16384; 50016 and 66688 are reported resident",
    "0seba, chunked_lm_head.py",
    "Anemll, llama_model.py",
    "videlalvaro/ane-book, journals 020, 021, 048",
    contested=(
        "that splitting works is agreed, that it is needed is not: 262144 channels ran in one convolution (john-rocky)"
    ),
)
def _wide_head(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        weight = subject.argument_type(op, "weight") if op.kind in ("conv", "linear") else None
        if weight is not None and weight.shape and (weight.shape[0] or 0) > MAX_OUTPUT_CHANNELS:
            yield Breach(label(op), f"{weight.shape[0]} output channels")
