"""Kinds of builds for `made`: their parts, and what the gates of each would have measured.

The numbers of each kind are listed by hand, as the gates of real builds make them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardmill.gates.by_bits import FOUR, limits_table
from shardmill.gates.measurement import Measurement, compare
from shardmill.gates.thresholds import THRESHOLDS, Allowed
from shardmill.models.architecture import EncoderIO, Experts, Graph, LayerSpec
from shardmill.models.contract import GraphSpec
from shardmill.models.interface import FIXED, HOST, EntryPoints
from shardmill.models.part_kinds import interface
from shardmill.plan import Part

GRAPH = Graph(hidden=96, heads=3, kv_heads=1, head_dim=32, rope_dim=32, ffn=128, rms_norm_eps=1e-5)
MIXTURE = replace(GRAPH, experts=Experts(count=4, chosen=2, ffn=64, group=1, routed=True))
SLOTS, TOKENS, VOCAB = 64, 4, 256
ROPE = {"rope": {"inv_freq": [1.0] * 16, "scale": 1.2, "factors": "short"}}
PORTABLE, CORE_ML = {"name": "portable"}, {"name": "coreml", "macos": "26.1", "build": "25B78", "chip": "Apple M4"}
# Values that numbers may have; 0 where nothing is said.
VALUES = {"psnr": 50.0, "kl": 0.001, "perplexity_ratio": 1.001, "label_kl": 0.001, "embedding_cosine": 0.999}
VALUES |= {name: 1.0 for name, threshold in THRESHOLDS.items() if name not in VALUES and threshold.at_least}
OWN = Allowed(1e-6, "32 times what rounding moves transformers' own result")

ROUNDED = ["weight_steps", "subnormal_steps", "scale_steps"]
WIDTHS = [f"width_error: T={width}" for width in (2, 3, 4)]
WAYS = [*WIDTHS, "width_error: mixed", "rejected_draft_error: rejected drafts"]
STATES = [f"width_state_error: state, {way}" for way in ("T=2", "T=3", "T=4", "mixed", "rejected drafts")]
MOVES = [f"width_error: {way}" for way in ("context of 32", "over the end of 32 slots")]
MOVES += ["rejected_draft_error: moving between contexts"]
PLACED = ["ineligible", "unknown", "program_findings"]
READ = ["kl", "top1_agreement", "perplexity_ratio"]
LAYERS = [*ROUNDED, "program_error", *WAYS, *STATES, "psnr"]
HEAD = [*ROUNDED, "program_error", *WIDTHS, "psnr"]
STACK = [*ROUNDED, "program_error", "argmax_mismatches", *WAYS, "speculation_mismatches", *READ]
ON_A_MAC = {name: "Core ML computes in fp16 only" for name in ("program_error", "argmax_mismatches")}


@dataclass(frozen=True)
class Form:
    """A kind of build.

    Attributes:
        parts: its parts but the embedding, in the order of a pass.
        verdicts: the names of each verdict's numbers, with the detail of their rows, by the verdict's step.
        model: what model.json has instead.
        config: what the config has instead.
        recipe: precision.json's `default` and `matrices`.
        limits: what names the limits of each verdict, by its step, unless they are the table's.
        search: search.json's content.
        engine: what judged it.
        not_run: of the stack.
    """

    parts: tuple[Part, ...]
    verdicts: Mapping[str, list[str]]
    model: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=lambda: {"default": "int8", "matrices": {}})
    limits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    search: Mapping[str, Any] | None = None
    engine: Mapping[str, str] = field(default_factory=lambda: PORTABLE)
    not_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def gates(self) -> dict[str, dict[str, Any]]:
        """The content of each verdict, by its step."""
        return {step: self.verdict(step, names) for step, names in self.verdicts.items()}

    def verdict(self, step: str, names: Iterable[str]) -> dict[str, Any]:
        gate, _, part = step.partition("/")
        judged = self.limits.get(step, {})
        budget, shares = judged.get("budget"), judged.get("shares")
        gates = compare(map(measurement, names), limits_table(judged.get("limits", ""), budget, shares))
        content = {"part": part, "engine": dict(self.engine), **judged, "gate": gates}
        if gate == "residency":
            evidence = "predicted" if self.engine == PORTABLE else "measured"
            return {**content, "evidence": evidence, "findings": [], "counts": {"eligible": 9}, "rows": []}
        return {**content, "not_run": dict(self.not_run) if part == "stack" else {}}

    def rows(self) -> list[dict[str, Any]]:
        """The parts of plan.json."""
        own = [
            {"name": part.name, "kind": part.kind, "start": part.start, "end": part.end}
            | interface(part.spec)
            | ({"drafter": True} if part.drafter else {})
            | ({"tokens": [1, 2]} if part.kind == "labels" else {})
            for part in self.parts
        ]
        return [*own, {"name": "embedding", "kind": "embedding", "start": 0, "end": VOCAB}]


def measurement(told: str) -> Measurement:
    """What "width_error: T=2" stands for."""
    name, _, detail = told.partition(": ")
    own = OWN if name.startswith(("width", "rejected", "bucket", "packing")) else None
    return Measurement(name, VALUES.get(name, 3e-7 if own else 0), detail, own)


def part(name: str, kind: str, start: int, end: int, graph: Graph = GRAPH, **more: Any) -> Part:
    """A part without tensors."""
    if kind != "layers":
        return Part(name, GraphSpec(kind, graph, rows=end - start, tokens=TOKENS), first=start, **more)
    layer = LayerSpec(ffn="experts" if graph.experts else "mlp")
    layers = tuple((i, layer) for i in range(start, end))
    return Part(name, GraphSpec(kind, graph, layers, tokens=TOKENS, slots=SLOTS), **more)


def judged(parts: Iterable[str], **parity: list[str]) -> dict[str, list[str]]:
    """The verdicts of parts: on residency, and on parity by name of the part; of the stack by `stack`."""
    placed = {f"residency/{name}": PLACED for name in parts}
    return placed | {f"parity/{name}": names for name, names in parity.items()}


LAYERS_PART, HEAD_PART = part("layers_00_02", "layers", 0, 2), part("head_0", "head", 0, VOCAB)
DECODER = Form(
    (LAYERS_PART, HEAD_PART),
    judged(("layers_00_02", "head_0"), layers_00_02=LAYERS, head_0=HEAD, stack=STACK),
    not_run={"width_error_fp16": "no Core ML here"},
)
FOUR_BITS = {"default": "int4", "matrices": {"lm_head.weight": "int8"}}
INT4 = replace(
    DECODER,
    config={"convert": {"precision": "int4"}},
    recipe=FOUR_BITS,
    limits={"parity/layers_00_02": {"limits": FOUR}, "parity/stack": {"limits": FOUR}},
)
MATRICES = [f"layers.{i}.{name}.weight" for i in range(2) for name in
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip
ONE_IN_FOUR_BITS = {"default": "int8", "matrices": {MATRICES[0]: "int4"}}
MIXED = replace(  # one of 14 matrices, which is less than a tenth of the weights
    DECODER,
    config={"convert": {"precision": "recipe.json"}},
    recipe=ONE_IN_FOUR_BITS,
    limits={"parity/layers_00_02": {"limits": FOUR, "shares": {FOUR: 4 / 14}}},
)
CHOSEN = {**dict.fromkeys([*MATRICES, "lm_head.weight"], "int8"), MATRICES[0]: "int4"}
SEARCHED = replace(
    DECODER,
    config={"convert": {"precision": "search", "budget": {"perplexity": 1.05}}},
    recipe=ONE_IN_FOUR_BITS,
    search={
        "forms": CHOSEN,
        "costs": {path: {"int8": 0.0, "int4": 0.01} for path in CHOSEN},
        "sizes": {path: {"int8": 2, "int4": 1} for path in CHOSEN},
        "estimate": {"kl": 0.01, "perplexity": 1.010050167084168, "bytes": 1, "bits_per_weight": 7.5},
    },
    limits={
        "parity/layers_00_02": {"limits": FOUR, "shares": {FOUR: 4 / 14}},
        "parity/stack": {"limits": FOUR, "budget": {"perplexity_ratio": 1.020100334168336, "kl": 0.02}},
    },
)
MOVED = EntryPoints(FIXED, (1, 4), HOST, (32,))
HOSTED = Form(
    (LAYERS_PART.changed(calls=MOVED), HEAD_PART.changed(calls=replace(MOVED, contexts=()))),
    judged(
        ("layers_00_02", "head_0"),
        layers_00_02=[*LAYERS, *MOVES],
        head_0=HEAD,
        stack=[*STACK, *MOVES],
    ),
    model={"contexts": [32]},
)
EXPERTS = Form(
    (
        part("layers_00_01", "layers", 0, 1, MIXTURE),
        part("experts_00_0", "experts", 0, 2, MIXTURE, layer=0),
        part("experts_00_1", "experts", 2, 4, MIXTURE, layer=0),
        part("head_0", "head", 0, VOCAB, MIXTURE),
    ),
    judged(
        ("layers_00_01", "experts_00_0", "experts_00_1", "head_0"),
        layers_00_01=[*ROUNDED, "program_error", "experts_agreement", *WAYS, *STATES, "psnr", "experts_agreement_fp16"],
        experts_00_0=HEAD,
        experts_00_1=HEAD,
        head_0=HEAD,
        stack=STACK,
    ),
    config={"topology": [[0, 1]], "experts": 2},
)
ADAPTED = Form(
    (
        LAYERS_PART.changed(calls=EntryPoints(adapters=8)),
        HEAD_PART,
        part("labels", "labels", 0, 16),
    ),
    judged(
        ("layers_00_02", "head_0", "labels"),
        layers_00_02=[*LAYERS, *(f"adapter_error: T={width}" for width in (1, 2, 3, 4))],
        head_0=HEAD,
        labels=HEAD,
        stack=STACK,
    ),
    model={"adapters": 8},
)
DRAFTING = Form(
    (
        LAYERS_PART,
        HEAD_PART,
        part("draft_fuse", "fuse", 0, 3, drafter=True),
        part("draft_layers", "layers", 0, 1, drafter=True),
        part("draft_head", "head", 0, VOCAB, drafter=True),
    ),
    judged(
        ("layers_00_02", "head_0", "draft_fuse", "draft_layers", "draft_head"),
        layers_00_02=LAYERS,
        head_0=HEAD,
        draft_fuse=HEAD,
        draft_layers=LAYERS,
        draft_head=HEAD,
        stack=[*STACK, "drafts_agreement", "drafts_agreement_fp16"],
    ),
    model={"drafter": {"kind": "eagle3", "taps": [1], "vocab": VOCAB, "rope": ROPE}},
)
IN_BUCKETS = ["program_error", "label_mismatches", "label_kl", "label_agreement", "span_agreement"]
ENCODING = [*ROUNDED, "program_error", "padding_error", "padding_error: in fp16", "packing_error", "psnr"]
ENCODING += ["psnr: half of a bucket, and one token", "psnr: two texts in a bucket"]
WIDER = ["label_kl", "label_agreement", "span_agreement"]
ENDS = EncoderIO(labels=3, final_norm=True)
SPEC = GraphSpec("encoder", GRAPH, tuple(enumerate((LayerSpec(),) * 2)), ends=ENDS)
ENCODER = Form(
    tuple(Part(f"encoder_{size}", replace(SPEC, tokens=size)) for size in (16, 32)),
    judged(
        ("encoder_16", "encoder_32"),
        encoder_16=ENCODING,
        encoder_32=ENCODING,
        stack=[*ROUNDED, *(f"{name}: bucket {size}" for size in (16, 32) for name in IN_BUCKETS)]
        + ["bucket_error: 16, 32", *(f"{name}: bucket 16, 32" for name in WIDER)],
    ),
    model={"buckets": [16, 32], "task": "token-classification", "labels": ["O", "B-X", "I-X"], "pooling": "mean"}
    | {"band": None, "reach": None, "context": 0, "widths": []},
    config={"context": None, "buckets": [16, 32]},
)
MEASURED = replace(
    DECODER,
    verdicts={
        "residency/layers_00_02": [*PLACED, "not_chosen"],
        "residency/head_0": [*PLACED, "not_chosen"],
        "parity/layers_00_02": [*ROUNDED]
        + [f"width_error_fp16: {way.partition(': ')[2]}" for way in (*WAYS, *STATES)]
        + ["psnr"],
        "parity/head_0": [*ROUNDED, *(f"width_error_fp16: {way.partition(': ')[2]}" for way in WIDTHS), "psnr"],
        "parity/stack": [*ROUNDED, *(f"width_error_fp16: {way.partition(': ')[2]}" for way in WAYS), *READ],
    },
    engine=CORE_ML,
    not_run=ON_A_MAC,
)
WITNESSED = replace(
    DECODER,
    verdicts=DECODER.verdicts
    | {
        "witness/layers_00_02": ["witness_error", "witness_agreement"]
        + [f"witness_width_error: {way.partition(': ')[2]}" for way in WAYS],
        "witness/head_0": ["witness_error", "witness_agreement"]
        + [f"witness_width_error: {way.partition(': ')[2]}" for way in WIDTHS],
    },
    config={"witness": True},
)
FORMS = {
    "decoder": DECODER,
    "int4": INT4,
    "mixed": MIXED,
    "searched": SEARCHED,
    "hosted": HOSTED,
    "experts": EXPERTS,
    "adapted": ADAPTED,
    "drafting": DRAFTING,
    "encoder": ENCODER,
    "measured": MEASURED,
    "witnessed": WITNESSED,
}
