"""All numbers that gates measure, in one table: the meaning of each, its limit, and the reason for the limit."""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.models import DECODER, ENCODER


@dataclass(frozen=True)
class Threshold:
    """The limit of a measurement, with the measurement's meaning in words."""

    question: str
    limit: float
    at_least: bool  # True if the limit is a minimum, False if it is a maximum
    meaning: str
    why: str
    of: str = ""  # the kind of model that the measurement applies to, CALIBRATED or MIXTURE; any if empty

    def holds(self, value: float) -> bool:
        """Return whether `value` is within the limit; NaN never is."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Allowed:
    """A limit that follows from the model, see disturbed.py, and the reason in words."""

    limit: float
    why: str


CLEAR_MARGIN = 0.1  # nat: below it the original's two best tokens, or labels, count as equal
CALIBRATED, MIXTURE = "calibrated", "mixture"  # builds with a quantiser's codes, and models with experts
ORDER = (
    "only the order of summation may differ: the square root of the longest sum times what rounding to fp32 moves "
    "transformers' own result, and never more than the program's error may be"
)
ROUNDING = (
    "only rounding may differ: eight times what rounding to fp16 moves transformers' own result, and never more than a "
    "tenth of the result"
)
PROGRAM, WIDTHS, COST, PLACEMENT, WITNESS = "1 program", "2 widths", "3 cost", "residency", "witness"

THRESHOLDS = {
    "weight_steps": Threshold(
        PROGRAM,
        0.6,
        False,
        "largest distance of a stored weight or embedding from the checkpoint's, in quantisation steps",
        "rounding to nearest is off by half a step, and the weight and the quotient in fp16 by 127 * (2^-11 + 2^-12), "
        "which is 0.093 of a step. Rounding down or cutting off is off by a whole step",
    ),
    "subnormal_steps": Threshold(
        PROGRAM,
        1.0,
        False,
        "largest distance of a weight from the checkpoint's in rows whose scale is below fp16's normal numbers, 2^-14",
        "half a step, and up to another half for the scale, which has fewer digits there",
    ),
    "scale_steps": Threshold(
        PROGRAM,
        1.0,
        False,
        "largest distance of a stored scale from its row's largest weight over the largest code, in steps of fp16",
        "the largest weight and the quotient are each rounded to fp16; a scale that is doubled is off by 1,024 steps",
    ),
    "codes_differ": Threshold(
        PROGRAM,
        0,
        False,
        "stored codes and scales that differ from the quantiser's",
        "a package follows from the quantiser's file, bit for bit",
        CALIBRATED,
    ),
    "code_steps": Threshold(
        PROGRAM,
        8.0,
        False,
        "largest distance of a weight whose code a quantiser chose from the checkpoint's, in quantisation steps",
        "codes make up for each other's errors, and half a range is 7 steps of INT4 short",
        CALIBRATED,
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
        DECODER,
    ),
    "experts_agreement": Threshold(
        PROGRAM,
        1.0,
        True,
        "share of tokens and layers that take transformers' experts with the same dequantised weights, in fp32",
        "same weights, same arithmetic; choices between scores that are equal to fp32 are counted apart",
        MIXTURE,
    ),
    "width_error": Threshold(
        WIDTHS,
        1e-4,
        False,
        "relative error between one token a pass and every other way to cut the sequence, in fp32",
        ORDER,
        DECODER,
    ),
    "width_state_error": Threshold(
        WIDTHS,
        1e-4,
        False,
        "relative error between the key/value states that the two ways leave behind, in fp32",
        ORDER,
        DECODER,
    ),
    "rejected_draft_error": Threshold(
        WIDTHS,
        1e-4,
        False,
        "relative error after passes whose drafted tokens were wrong and were fed again",
        "rejected slots are masked, then overwritten: no trace may be left. " + ORDER,
        DECODER,
    ),
    "speculation_mismatches": Threshold(
        WIDTHS,
        0,
        False,
        "tokens of a greedy text that drafting changes, and passes that do not accept exactly the right drafts",
        "speculation changes how many passes a text takes, never the text",
        DECODER,
    ),
    "width_error_fp16": Threshold(
        WIDTHS,
        0.1,
        False,
        "relative error between one token a pass and every other way, on an engine that computes in fp16",
        ROUNDING,
        DECODER,
    ),
    "psnr": Threshold(
        COST,
        30.0,
        True,
        "peak signal-to-noise ratio in dB of the program as shipped against the original weights in fp32",
        "INT8 per channel; Apple's coreai-models asks 40 of compiled fp16 and 35 of 4-bit models on whole outputs",
    ),
    "experts_agreement_fp16": Threshold(
        COST,
        0.9,
        True,
        "share of tokens and layers that take the same experts as shipped as with the original weights in fp32",
        "scores that are closer than fp16 tells apart are counted apart; what INT8 moves further down a part is not",
        MIXTURE,
    ),
    "kl": Threshold(
        COST,
        0.02,
        False,
        "mean KL divergence in nats of the next-token distribution as shipped from the original's",
        "INT8 per channel costs a few 1e-3",
        DECODER,
    ),
    "top1_agreement": Threshold(
        COST,
        0.99,
        True,
        "share of positions with the same most likely token, where the original's margin is 0.1 nat or more",
        "a smaller margin is a coin toss; such positions are counted apart",
        DECODER,
    ),
    "perplexity_ratio": Threshold(
        COST,
        1.01,
        False,
        "perplexity of the stack as shipped, divided by the original's",
        "coreai-models allows 0.3 %",
        DECODER,
    ),
    "label_mismatches": Threshold(
        PROGRAM,
        0,
        False,
        "tokens, or texts, whose most likely label differs from transformers'",
        "same weights, same arithmetic",
        ENCODER,
    ),
    "padding_error": Threshold(
        WIDTHS,
        1e-5,
        False,
        "relative error where noise fills up a bucket instead of zeros, in passes of half its length",
        "no token sees what fills a bucket up",
        ENCODER,
    ),
    "packing_error": Threshold(
        WIDTHS,
        1e-4,
        False,
        "relative error where two texts share a pass instead of taking one each, in fp32",
        ORDER,
        ENCODER,
    ),
    "packing_error_fp16": Threshold(
        WIDTHS,
        0.1,
        False,
        "relative error where two texts share a pass instead of taking one each, as Core ML computes",
        ROUNDING,
        ENCODER,
    ),
    "bucket_error": Threshold(
        WIDTHS,
        1e-4,
        False,
        "relative error between the same text in one bucket and in a larger one, in fp32",
        ORDER,
        ENCODER,
    ),
    "bucket_error_fp16": Threshold(
        WIDTHS,
        0.1,
        False,
        "relative error between the same text in one bucket and in a larger one, on an engine that computes in fp16",
        ROUNDING,
        ENCODER,
    ),
    "label_kl": Threshold(
        COST,
        0.02,
        False,
        "mean KL divergence in nats of the labels' distribution as shipped from the original's",
        "the limit of next-token distributions: INT8 per channel costs a few 1e-3",
        ENCODER,
    ),
    "label_agreement": Threshold(
        COST,
        0.99,
        True,
        "share of tokens, or texts, with the same most likely label, where the original's margin is 0.1 nat or more",
        "a smaller margin is a coin toss; such tokens are counted apart",
        ENCODER,
    ),
    "span_agreement": Threshold(
        COST,
        0.98,
        True,
        "share of spans that both find, among those in and beside which the original is decided on every token",
        "a span has several tokens, and each token may differ as the agreement of labels allows",
        ENCODER,
    ),
    "embedding_cosine": Threshold(
        COST,
        0.99,
        True,
        "least cosine of a token's hidden state as shipped with the original's",
        "INT8 per channel costs a few 1e-3",
        ENCODER,
    ),
    "ineligible": Threshold(
        PLACEMENT,
        0,
        False,
        "operations that can't run on the Neural Engine",
        "a single one can keep the whole program off it",
    ),
    "not_chosen": Threshold(
        PLACEMENT,
        0,
        False,
        "operations that could run on the Neural Engine and were given to another device",
        "each costs a way there and back; programs under the size of rule W5 are expected on the CPU and not counted",
    ),
    "unknown": Threshold(
        PLACEMENT,
        0,
        False,
        "operations that are not known to be able to run on the Neural Engine",
        "what is not known counts as a failure",
    ),
    "program_findings": Threshold(
        PLACEMENT,
        0,
        False,
        "errors of the program as a whole: shapes, states, size",
        "each is known to keep a program off the Neural Engine",
    ),
    "witness_error": Threshold(
        WITNESS,
        1e-4,
        False,
        "relative error of the part on Apple's Core AI runtime against transformers with the stored weights, in fp32",
        "both compute in fp32 from equal weights, so the limit is the limit of program_error",
    ),
    "witness_width_error": Threshold(
        WITNESS,
        1e-4,
        False,
        "relative error on Apple's runtime between one token a pass and every other way to cut the sequence",
        "both compute in fp32 from equal weights, so the limit is the limit of width_error",
        DECODER,
    ),
    "witness_agreement": Threshold(
        WITNESS,
        1e-4,
        False,
        "relative difference between Apple's runtime and the portable engine, in fp32",
        "each is allowed half of it by its own distance from transformers, and measured ones are a hundredth",
    ),
}
