"""The numbers that each verdict must have: whoever reads a verdict can tell what was left out of it.

A verdict lists what was measured. What should have been follows from the part that was judged, from the widths of the
passes, and from the engine: Core ML has no fp32 mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.gates.passes import MOVING, REJECTED, at_lengths, compared_widths, part_schedules, schedules
from shardmill.models.architecture import EMBED, LABEL
from shardmill.models.caches import CacheKind, cache_kind
from shardmill.models.contract import caches
from shardmill.models.interface import TOWER
from shardmill.plan import Part
from shardmill.runtime.manifest import MARK, lengths, verify_width

ROUNDED = ("weight_steps", "subnormal_steps", "scale_steps")
CODED = ("codes_differ", "code_steps")
PLACED = ("ineligible", "unknown", "program_findings")
SMALL = "W5"  # the finding of a program that Core ML may leave to the CPU


@dataclass(frozen=True)
class Number:
    """A number that a verdict must have.

    Attributes:
        name: a key of THRESHOLDS.
        detail: how the detail of its row begins, if that tells rows of one name apart.
        may_be_skipped: whether a reason why it was not run may stand in its place.
    """

    name: str
    detail: str = ""
    may_be_skipped: bool = False

    def is_in(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row of a verdict has this number."""
        begins = re.match(rf"{re.escape(self.detail)}\b", str(row.get("detail", "")))
        return row.get("name") == self.name and (not self.detail or begins is not None)


def part_numbers(part: Part, verify: int, portable: bool, coded: bool) -> Iterator[Number]:
    """Yield the numbers of a part's parity.

    Args:
        part: any part but the embedding.
        verify: the most tokens of a decode pass.
        portable: whether the portable engine judged it, and not Core ML.
        coded: whether its package was made of a quantiser's codes.
    """
    yield from map(Number, (*ROUNDED, *(CODED if coded else ())))
    if part.kind == TOWER:
        yield from map(Number, ("tower_error", "faint_error") if portable else ())
        yield from map(Number, ("padding_error", "tower_cosine_fp16", "tower_cosine"))
        return
    if portable:
        yield Number("program_error")
    if part.spec.encodes:
        yield from (Number("padding_error", detail) for detail in ("", *(("in fp16",) if portable else ())))
        yield from (Number("psnr", detail) for detail in ("half of a bucket", "two texts in a bucket"))
        if part.spec.tokens > 1:  # a text of one token has no halves
            yield Number(_rounded("packing_error", portable))
    else:
        yield from _widths([*part_schedules(part, 1, verify), *_moves(part, verify)], portable)
    if portable and not part.spec.encodes:
        plain = schedules(1, verify, part.spec.tokens)
        if any(cache_kind(name) is not CacheKind.STATE for name in caches(part.spec)):
            yield from (Number("width_state_error", f"state, {name}") for name in plain)
        if part.spec.routes:
            yield Number("experts_agreement")
            yield from (Number("experts_agreement_fp16") for _ in range(not part.drafter))
        if part.spec.calls.adapters and not part.spec.routes:
            widths = (1, *compared_widths(verify, part.spec.tokens))
            yield from (
                Number("adapter_error", name) for name in (*(f"T={width}" for width in widths), *_moves(part, verify))
            )
    yield Number("psnr")


def stack_numbers(model: Mapping[str, Any], portable: bool) -> Iterator[Number]:
    """Yield the numbers of all programs together; `model` is model.json's content."""
    yield from map(Number, ROUNDED)
    if MARK in model:
        yield from _encoder_numbers(model, portable)
        return
    if portable:
        yield from map(Number, ("program_error", "argmax_mismatches", "speculation_mismatches"))
    verify, widest = verify_width(model), model["tokens_max"]
    yield from _widths([*schedules(1, verify, widest), *at_lengths(1, [1], verify, lengths(model))], portable)
    if "drafter" in model:  # whose reference may draft nothing along a text
        names = ("drafts_agreement", "drafts_agreement_fp16") if portable else ("drafts_agreement_fp16",)
        yield from (Number(name, may_be_skipped=True) for name in names)
    yield Number("kl")
    # A model may be decided at no position of a text, or unable to read it.
    yield from (Number(name, may_be_skipped=True) for name in ("top1_agreement", "perplexity_ratio"))


def _encoder_numbers(model: Mapping[str, Any], portable: bool) -> Iterator[Number]:
    for bucket in model[MARK]:
        where = f"bucket {bucket}"
        if portable:
            yield Number("program_error", where)
            yield from (Number("label_mismatches", where) for _ in model["labels"][:1])
        larger = (size for size in model[MARK] if size > bucket)
        yield from (Number(_rounded("bucket_error", portable), f"{bucket}, {size}") for size in larger)
        widest = max(model[MARK])
        for shown in (where, *([f"{where}, {widest}"] if widest > bucket else [])):
            if model["task"] == EMBED:
                yield Number("embedding_cosine", shown)
                continue
            yield Number("label_kl", shown)
            yield Number("label_agreement", shown, may_be_skipped=True)  # the original may be decided on no label
            if model["task"] == LABEL:
                yield Number("span_agreement", shown, may_be_skipped=True)


def placement_numbers(findings: Sequence[Mapping[str, Any]], portable: bool) -> Iterator[Number]:
    """Yield the numbers of a part's residency; `findings` are the verdict's."""
    yield from map(Number, PLACED)
    if not portable and all(finding["rule"] != SMALL for finding in findings):
        yield Number("not_chosen")


def witness_numbers(part: Part, verify: int, portable: bool) -> Iterator[Number]:
    """Yield the numbers of a part on Apple's runtime."""
    yield Number("witness_error")
    ways = [] if part.spec.encodes else [*part_schedules(part, 1, verify)]
    yield from (Number("witness_width_error", name) for name in ways)
    if portable:
        yield Number("witness_agreement")


def _widths(ways: Sequence[str], portable: bool) -> Iterator[Number]:
    """Yield a number for each way to split a sequence."""
    for name in ways:
        measure = "rejected_draft_error" if name in (REJECTED, MOVING) else "width_error"
        # In fp16 rounding alone may send tokens to other experts, and then widths can't be compared.
        yield Number(measure, name) if portable else Number("width_error_fp16", name, may_be_skipped=True)


def _moves(part: Part, verify: int) -> list[str]:
    """Return the ways that need several contexts."""
    return [*at_lengths(1, [1], verify, (*part.spec.calls.contexts, part.spec.slots))]


def _rounded(name: str, portable: bool) -> str:
    return name if portable else f"{name}_fp16"
