"""All numbers that gates measure, in one table: the meaning of each, its limit, and the reason for the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardmill.models import DECODER, ENCODER


@dataclass(frozen=True)
class Threshold:
    """The limit of a measurement, with the measurement's meaning in words."""

    question: str
    limit: float
    meaning: str
    why: str
    of: str = ""  # the models or builds that the measurement applies to, such as DECODER or ADAPTED; all if empty
    at_least: bool = False  # True if the limit is a minimum, False if it is a maximum
    # Where weights have FOUR or SIX bits, the limit with its reason; empty if the bits make no difference.
    fewer: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def holds(self, value: float) -> bool:
        """Return whether `value` is within the limit; NaN never is."""
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def told(self) -> str:
        """Return the limit as a verdict states it: "<= 0.02"."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


@dataclass(frozen=True)
class Allowed:
    """A limit that follows from the model, see disturbed.py, and the reason in words."""

    limit: float
    why: str


CLEAR_MARGIN = 0.1  # nat: below it the original's two best tokens, or labels, count as equal
# Builds with a quantiser's codes, models with experts, and builds with a drafter or whose programs take adapters.
CALIBRATED, MIXTURE, DRAFTED, ADAPTED = "calibrated", "mixture", "drafted", "adapted"
PICTURED = "pictured"  # builds with images
ORDER = (
    "only the order of sums may differ: twice the square root of the longest sum times what rounding to fp32 moves "
    "transformers' own result, and never more than the program's error may be"
)
ROUNDING = (
    "only rounding may differ: eight times what rounding to fp16 moves transformers' own result, and never more than a "
    "tenth of the result"
)
FOUR, SIX = "4 bits", "6 bits"
FEWER = {4: FOUR, 6: SIX}  # by the bits of a form, the fewest first; other forms are judged as INT8 is
LOUDER = "a bit less is 6 dB more noise: the limit of INT8, less {} dB"
SAME = "follows from the limit on perplexity: a loss of 20 % is 0.18 nat a token"
APPLE = "Apple's own models of 4 to 6 bits lose 14.6 to 18.1 % in perplexity on WikiText-2 (coreai-models 86b363d)"
BETWEEN = "between the limits of INT8 and of 4 bits"
SPANS = "a span has several tokens, and each token may differ as the agreement of labels allows"
PROGRAM, WIDTHS, COST, PLACEMENT, WITNESS = "1 program", "2 widths", "3 cost", "residency", "witness"

THRESHOLDS = {
    "weight_steps": Threshold(
        PROGRAM,
        0.6,
        "largest distance of a stored weight or embedding from the checkpoint's, in quantisation steps",
        "rounding to nearest is off by half a step, and the weight and the quotient in fp16 by 127 * (2^-11 + 2^-12), "
        "which is 0.093 of a step. Rounding down or cutting off is off by a whole step",
    ),
    "subnormal_steps": Threshold(
        PROGRAM,
        1.0,
        "largest distance of a weight from the checkpoint's in rows whose scale is below fp16's normal numbers, 2^-14",
        "half a step, and up to another half for the scale, which has fewer digits there",
    ),
    "scale_steps": Threshold(
        PROGRAM,
        1.0,
        "largest distance of a stored scale from its row's largest weight over the largest code, in steps of fp16",
        "the largest weight and the quotient are each rounded to fp16; a scale that is doubled is off by 1,024 steps",
    ),
    "codes_differ": Threshold(
        PROGRAM,
        0,
        "stored codes and scales that differ from the quantiser's",
        "a package follows from the quantiser's file, bit for bit",
        CALIBRATED,
    ),
    "code_steps": Threshold(
        PROGRAM,
        8.0,
        "largest distance of a weight whose code a quantiser chose from the checkpoint's, in quantisation steps",
        "codes make up for each other's errors, and half a range is 7 steps of INT4 short",
        CALIBRATED,
    ),
    "program_error": Threshold(
        PROGRAM,
        1e-4,
        "relative error of the program in fp32 against transformers with the same dequantised weights, worst token",
        "a unit of fp32, 2^-24, times the root of the longest sum and of the roundings in turn, 13 a layer, is 7e-5 "
        "for 24 layers with sums of 4,864 in the worst order; measured ones are a tenth of it. One layer in fp16 is "
        "off by 2e-4 and more, an epsilon of 1e-5 in place of 1e-3 by 1e-3, a wrong graph by 1e-2 and more",
    ),
    "tower_error": Threshold(
        PROGRAM,
        1e-5,
        "relative error of a tower's program in fp32 against transformers with the same dequantised weights, worst row",
        "a tenth of program_error: towers have fewer layers and shorter sums, and ones of 27 layers are off by 2e-6. "
        "GELU by tanh in place of itself moves rows by 6e-5, a wrong position by 1e-2",
        PICTURED,
    ),
    "faint_error": Threshold(
        PROGRAM,
        1e-4,
        "relative error of the tower for an image that positions almost cancel, so that epsilons of norms count",
        "what cancels to a tenth leaves ten times the error. An epsilon of ten times the size moves rows by 1e-3",
        PICTURED,
    ),
    "adapter_error": Threshold(
        PROGRAM,
        1e-4,
        "relative error in fp32 with an adapter of every projection, in passes of any width, against transformers with "
        "the same weights and B A added to them",
        "the limit of program_error: two products more for each projection. A matrix in another's place is off by its "
        "share of a weight, a half",
        ADAPTED,
    ),
    "argmax_mismatches": Threshold(
        PROGRAM,
        0,
        "positions whose most likely token differs from transformers'",
        "same weights, same arithmetic",
        DECODER,
    ),
    "drafts_agreement": Threshold(
        PROGRAM,
        1.0,
        "share of drafted tokens that transformers' reference of the drafter drafts, with the same weights, in fp32",
        "same weights, same arithmetic. The drafter gets the model's hidden states in fp16. Drafts whose best two "
        "logits this may exchange, by six times what it moves their distance in the reference, are counted apart",
        DRAFTED,
        at_least=True,
    ),
    "drafts_agreement_fp16": Threshold(
        PROGRAM,
        0.95,
        "share of drafted tokens that the reference drafts, where the model and the drafter compute in fp16",
        "drafts whose two best logits fp16 may exchange, by six times what noise of its size moves their distance in "
        "the reference, are counted apart. One draft in twenty is left to devices that also accumulate in fp16",
        DRAFTED,
        at_least=True,
    ),
    "experts_agreement": Threshold(
        PROGRAM,
        1.0,
        "share of tokens and layers that take transformers' experts with the same dequantised weights, in fp32",
        "same weights, same arithmetic; choices between scores that are equal to fp32 are counted apart",
        MIXTURE,
        at_least=True,
    ),
    "width_error": Threshold(
        WIDTHS,
        1e-4,
        "relative error between one token a pass and every other way to cut the sequence, in fp32",
        ORDER,
        DECODER,
    ),
    "width_state_error": Threshold(
        WIDTHS,
        1e-4,
        "relative error between the key/value states that the two ways leave behind, in fp32",
        ORDER,
        DECODER,
    ),
    "rejected_draft_error": Threshold(
        WIDTHS,
        1e-4,
        "relative error after passes whose drafted tokens were wrong and were fed again",
        "rejected slots are masked, then overwritten: no trace may be left. " + ORDER,
        DECODER,
    ),
    "speculation_mismatches": Threshold(
        WIDTHS,
        0,
        "tokens of a greedy text that drafting changes, and passes that do not accept exactly the right drafts",
        "speculation changes how many passes a text takes, never the text",
        DECODER,
    ),
    "width_error_fp16": Threshold(
        WIDTHS,
        0.1,
        "relative error between one token a pass and every other way, on an engine that computes in fp16",
        ROUNDING,
        DECODER,
    ),
    "psnr": Threshold(
        COST,
        30.0,
        "peak signal-to-noise ratio in dB of the program as shipped against the original weights in fp32",
        "INT8 per channel; Apple's coreai-models asks 40 of compiled fp16 and 35 of 4-bit models on whole outputs",
        at_least=True,
        fewer={FOUR: (6.0, LOUDER.format(24)), SIX: (18.0, LOUDER.format(12))},
    ),
    "experts_agreement_fp16": Threshold(
        COST,
        0.9,
        "share of tokens and layers that take the same experts as shipped as with the original weights in fp32",
        "scores that are closer than fp16 tells apart are counted apart; what INT8 moves further down a part is not",
        MIXTURE,
        at_least=True,
        fewer={
            FOUR: (0.6, "scores move by sixteen times as much as with INT8"),
            SIX: (0.8, "scores move by four times as much as with INT8"),
        },
    ),
    "kl": Threshold(
        COST,
        0.02,
        "mean KL divergence in nats of the next-token distribution as shipped from the original's",
        "INT8 per channel costs a few 1e-3",
        DECODER,
        fewer={FOUR: (0.2, SAME), SIX: (0.06, BETWEEN)},
    ),
    "top1_agreement": Threshold(
        COST,
        0.99,
        "share of positions with the same most likely token, where the original's margin is 0.1 nat or more",
        "a smaller margin is a coin toss; such positions are counted apart",
        DECODER,
        at_least=True,
        fewer={FOUR: (0.8, SAME), SIX: (0.95, BETWEEN)},
    ),
    "perplexity_ratio": Threshold(
        COST,
        1.01,
        "perplexity of the stack as shipped, divided by the original's",
        "coreai-models allows 0.3 %",
        DECODER,
        fewer={FOUR: (1.2, APPLE), SIX: (1.05, BETWEEN)},
    ),
    "label_mismatches": Threshold(
        PROGRAM,
        0,
        "tokens, or texts, whose most likely label differs from transformers'",
        "same weights, same arithmetic",
        ENCODER,
    ),
    "padding_error": Threshold(
        WIDTHS,
        1e-5,
        "relative error where noise fills up a bucket instead of zeros, in passes of half its length",
        "no token sees what fills a bucket up: its weight, exp(-10,000), is 0 in every format, and the same sums are "
        "equal. A tenth of program_error is left to kernels that sum otherwise; one slot that is seen is off by more",
        ENCODER,
    ),
    "packing_error": Threshold(
        WIDTHS,
        1e-4,
        "relative error where two texts share a pass instead of taking one each, in fp32",
        ORDER,
        ENCODER,
    ),
    "packing_error_fp16": Threshold(
        WIDTHS,
        0.1,
        "relative error where two texts share a pass instead of taking one each, as Core ML computes",
        ROUNDING,
        ENCODER,
    ),
    "bucket_error": Threshold(
        WIDTHS,
        1e-4,
        "relative error between the same text in one bucket and in a larger one, in fp32",
        ORDER,
        ENCODER,
    ),
    "bucket_error_fp16": Threshold(
        WIDTHS,
        0.1,
        "relative error between the same text in one bucket and in a larger one, on an engine that computes in fp16",
        ROUNDING,
        ENCODER,
    ),
    "label_kl": Threshold(
        COST,
        0.02,
        "mean KL divergence in nats of the labels' distribution as shipped from the original's",
        "the limit of next-token distributions: INT8 per channel costs a few 1e-3",
        ENCODER,
        fewer={
            FOUR: (0.2, "the limit of next-token distributions"),
            SIX: (0.06, "the limit of next-token distributions"),
        },
    ),
    "label_agreement": Threshold(
        COST,
        0.99,
        "share of tokens, or texts, with the same most likely label, where the original's margin is 0.1 nat or more",
        "a smaller margin is a coin toss; such tokens are counted apart",
        ENCODER,
        at_least=True,
        fewer={FOUR: (0.9, "labels are few, and their margins wide"), SIX: (0.97, BETWEEN)},
    ),
    "span_agreement": Threshold(
        COST,
        0.98,
        "share of spans that both find, among those in and beside which the original is decided on every token",
        SPANS,
        ENCODER,
        at_least=True,
        fewer={FOUR: (0.8, SPANS), SIX: (0.94, BETWEEN)},
    ),
    "embedding_cosine": Threshold(
        COST,
        0.99,
        "least cosine of a token's hidden state as shipped with the original's",
        "INT8 per channel costs a few 1e-3",
        ENCODER,
        at_least=True,
        fewer={FOUR: (0.9, "noise of a fifth of the signal's power leaves 0.9"), SIX: (0.97, BETWEEN)},
    ),
    "tower_cosine_fp16": Threshold(
        COST,
        0.9999,
        "least cosine of a row as shipped with transformers' row with the same weights",
        "rounding to fp16 costs a few 1e-6 in 27 layers",
        PICTURED,
        at_least=True,
    ),
    "tower_cosine": Threshold(
        COST,
        0.999,
        "least cosine of a row as shipped with the original's",
        "INT8 per channel costs 4e-4 in 27 layers",
        PICTURED,
        at_least=True,
    ),
    "ineligible": Threshold(
        PLACEMENT,
        0,
        "operations that can't run on the Neural Engine",
        "a single one can keep the whole program off it",
    ),
    "not_chosen": Threshold(
        PLACEMENT,
        0,
        "operations that could run on the Neural Engine and were given to another device",
        "each costs a way there and back; programs under the size of rule W5 are expected on the CPU and not counted",
    ),
    "unknown": Threshold(
        PLACEMENT,
        0,
        "operations that are not known to be able to run on the Neural Engine",
        "what is not known counts as a failure",
    ),
    "program_findings": Threshold(
        PLACEMENT,
        0,
        "errors of the program as a whole: shapes, states, size",
        "each is known to keep a program off the Neural Engine",
    ),
    "witness_error": Threshold(
        WITNESS,
        1e-4,
        "relative error of the part on Apple's Core AI runtime against transformers with the stored weights, in fp32",
        "both compute in fp32 from equal weights, so the limit is the limit of program_error",
    ),
    "witness_width_error": Threshold(
        WITNESS,
        1e-4,
        "relative error on Apple's runtime between one token a pass and every other way to cut the sequence",
        "both compute in fp32 from equal weights, so the limit is the limit of width_error",
        DECODER,
    ),
    "witness_agreement": Threshold(
        WITNESS,
        1e-4,
        "relative difference between Apple's runtime and the portable engine, in fp32",
        "each is allowed half of it by its own distance from transformers, and measured ones are a hundredth",
    ),
}
