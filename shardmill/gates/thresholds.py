"""Every threshold of every gate, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardmill.errors import GateError


@dataclass(frozen=True)
class Threshold:
    """A number that a measurement may not pass."""

    question: str
    limit: float
    at_least: bool  # True: the value must not be under the limit; False: not over it
    meaning: str
    why: str

    def holds(self, value: float) -> bool:
        """Whether `value` is on the right side; NaN never is."""
        return value >= self.limit if self.at_least else value <= self.limit


PROGRAM, WIDTHS, COST, PLACEMENT = "1 program", "2 widths", "3 cost", "residency"

THRESHOLDS = {
    "weight_steps": Threshold(
        PROGRAM,
        1.0,
        False,
        "largest distance of a stored weight from the checkpoint's, in quantisation steps",
        "half a step is rounding, up to another half the scale's own rounding to fp16 where it is subnormal",
    ),
    "program_error": Threshold(
        PROGRAM,
        1e-4,
        False,
        "relative error of the program in fp32 against transformers with the same dequantised weights, worst token",
        "fp32 rounding through 32 layers stays under it; a wrong graph is off by 1e-2 and more",
    ),
    "argmax_mismatches": Threshold(
        PROGRAM,
        0,
        False,
        "positions whose most likely token differs from transformers'",
        "same weights, same arithmetic",
    ),
    "width_error": Threshold(
        WIDTHS,
        1e-5,
        False,
        "relative error between one token a pass and every other way to cut the sequence, in fp32",
        "only the order of summation may differ",
    ),
    "width_state_error": Threshold(
        WIDTHS,
        1e-5,
        False,
        "the same for the key/value state that is left behind",
        "only the order of summation may differ",
    ),
    "rejected_draft_error": Threshold(
        WIDTHS,
        1e-5,
        False,
        "relative error after passes whose drafted tokens were wrong and were fed again",
        "rejected slots are masked, then overwritten: no trace may be left",
    ),
    "speculation_mismatches": Threshold(
        WIDTHS,
        0,
        False,
        "tokens of a greedy text that drafting changes, and passes that do not accept just the drafts that are right",
        "speculation changes how many passes a text takes, never the text",
    ),
    "width_error_fp16": Threshold(
        WIDTHS, 5e-3, False, "the same on an engine that computes in fp16", "fp16 rounding of activations and states"
    ),
    "psnr": Threshold(
        COST,
        30.0,
        True,
        "peak signal-to-noise ratio in dB of the fp16 INT8 program against the original weights in fp32",
        "INT8 per channel; Apple's coreai-models asks 40 of compiled fp16 and 35 of 4-bit models on whole outputs",
    ),
    "kl": Threshold(
        COST,
        0.02,
        False,
        "mean KL divergence in nats of the next-token distribution",
        "INT8 per channel costs a few 1e-3",
    ),
    "top1_agreement": Threshold(
        COST,
        0.99,
        True,
        "share of positions with the same most likely token, where the original's margin is 0.1 nat or more",
        "a smaller margin is a coin toss; such positions are counted apart",
    ),
    "perplexity_ratio": Threshold(
        COST,
        1.01,
        False,
        "perplexity of the fp16 INT8 stack over the original's",
        "coreai-models allows 0.3 %",
    ),
    "ineligible": Threshold(
        PLACEMENT, 0, False, "operations that can't run on the Neural Engine", "one leaves the whole graph"
    ),
    "not_chosen": Threshold(
        PLACEMENT,
        0,
        False,
        "operations that could run on the Neural Engine and were given to another device",
        "each is a way there and back; programs under the size of rule W5 are expected on the CPU and not asked",
    ),
    "unknown": Threshold(
        PLACEMENT, 0, False, "operations of which it is not known whether they can", "unknown counts as failure"
    ),
    "program_findings": Threshold(
        PLACEMENT, 0, False, "errors of the program as a whole: shapes, states, size", "each is known to leave the ANE"
    ),
}


@dataclass(frozen=True)
class Measurement:
    """One number of a gate."""

    name: str
    value: float
    detail: str = ""


@dataclass(frozen=True)
class NotRun:
    """A number that could not be measured, or would say nothing, and why."""

    name: str
    reason: str


def compare(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Rows of a report, whether they passed or not."""
    rows = []
    for m in measurements:
        threshold = THRESHOLDS[m.name]
        sign = ">=" if threshold.at_least else "<="
        rows.append({**asdict(m), "threshold": f"{sign} {threshold.limit:g}", "passed": threshold.holds(m.value)})
        rows[-1] |= {"question": threshold.question, "meaning": threshold.meaning}
    return rows


def demand(gate: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raises GateError naming each number that missed its threshold."""
    missed = [row for row in rows if not row["passed"]]
    if missed:
        raise GateError(f"{gate}: {'; '.join(map(describe, missed))}")


def describe(row: Mapping[str, Any]) -> str:
    """A number beside the threshold that it missed."""
    detail = f" ({row['detail']})" if row["detail"] else ""
    return f"{row['name']} is {row['value']:.3g}, must be {row['threshold']}{detail}"
