"""The gates of encoders: they pass what is right, and each kind of fault raises the number that is there for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import encoders
import limits
import numpy as np
import pytest
import torch
from models import tiny_encoders

from shardmill.errors import GateError
from shardmill.gates import encoder as gates
from shardmill.gates import measurement
from shardmill.gates.case import Case
from shardmill.gates.encoder_reference import EncoderReference, answer_rows, passages
from shardmill.gates.parity import part_parity
from shardmill.gates.passes import Pass, together
from shardmill.gates.reference import checkpoint_weights
from shardmill.gates.rounding import weights_kept
from shardmill.gates.runner import PartRunner
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as, precision
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL, RANK
from shardmill.plan import Part
from shardmill.runtime.encoder import Encoder
from shardmill.runtime.kv import Floats
from shardmill.runtime.pack import encoder_arrays

from .judged import in_int8

TOKENS = tiny_encoders.tiny_text(50)
BUCKETS = [16, 64]
# Core ML has no fp32 mode: nothing is compared in fp32 there, and widths are compared to within fp16's rounding.
SUFFIX, IN_FP32 = ("", {"program_error"}) if is_portable() else ("_fp16", set())
FP16 = limits.model(3, 1, "fp16")  # three layers; sums are wider than what they are rounded to
PACKING, BUCKET = f"packing_error{SUFFIX}", f"bucket_error{SUFFIX}"


@dataclass(frozen=True)
class Made:
    """A build with all that its gates are given."""

    folder: Path
    source: Path
    parts: dict[str, Part]
    plan: dict[str, Any]
    known: dict[str, torch.Tensor]

    def reference(self) -> EncoderReference:
        return EncoderReference(self.source, self.plan["task"])

    def chain(self, bucket: int) -> list[Part]:
        return [part for part in self.parts.values() if part.kind == "encoder" and part.spec.tokens == bucket]

    def stored(self, bucket: int, place: int = 0) -> PackageWeights:
        part = self.chain(bucket)[place]
        return PackageWeights(self.folder / f"{part.name}.mlpackage", part, self.plan["prefix"])

    def case(self, bucket: int, place: int = 0) -> Case:
        weights, part = checkpoint_weights(self.source, self.plan["prefix"]), self.chain(bucket)[place]
        texts, known = passages(TOKENS, bucket, self.plan["task"]), gates.known_of(part, self.known)
        stored = self.stored(bucket, place)
        return gates.encoder_case(part, self.plan, self.reference(), texts, known, stored, weights)

    def part(self, bucket: int, runner: type[PartRunner] = PartRunner, place: int = 0) -> list[dict[str, Any]]:
        """The rows of a part's verdict."""
        part = self.chain(bucket)[place]
        made = runner(self.folder / f"{part.name}.mlmodelc", part, self.plan)
        kept = weights_kept(self.stored(bucket, place), self.source, in_int8(part))
        found = chain(kept, part_parity(made, self.case(bucket, place)))
        return measurement.compare(one for one in found if isinstance(one, measurement.Measurement))

    def stack(self, encoder: type[Encoder] = Encoder) -> list[dict[str, Any]]:
        """The rows of the stack's verdict."""
        manifest = json.loads((self.folder / "model.json").read_text())

        def load() -> Encoder:
            return encoder(manifest, self.folder)

        stored = [self.stored(16, place) for place in range(len(self.chain(16)))]
        found = gates.encoder_stack_parity(load, self.reference(), stored, self.plan, self.known)
        return measurement.compare(one for one in found if isinstance(one, measurement.Measurement))


@pytest.fixture(scope="module")
def labelling(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return build(tmp_path_factory.mktemp("labels"), "modernbert", LABEL)


OTHERS = [("bert", CLASSIFY), ("bert", EMBED), ("gemma3_text", EMBED), ("embedding_gemma2", EMBED), ("qwen3", RANK)]
# One layer of each kind of these: coremltools converts an encoder whole, at each size.
SHORT = {
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3": {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
}
LONGER = [
    pytest.param((name, EMBED), marks=pytest.mark.slow, id=f"{name} {EMBED}")
    for name in ("qwen3", "embedding_gemma2_text")
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A BERT with the epsilon that every BERT has: its square root is below fp16's normal numbers."""
    return build(tmp_path_factory.mktemp("plain"), "bert", EMBED, layer_norm_eps=1e-12)


@pytest.fixture(params=[("modernbert", LABEL), *OTHERS, *LONGER], ids=" ".join)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    shared = {("modernbert", LABEL): "labelling", ("bert", EMBED): "plain"}.get(request.param)
    found: Made = request.getfixturevalue(shared) if shared else build(tmp_path, *request.param)
    return found


def build(folder: Path, model_type: str, task: str, cuts: Sequence[int] = (), **changes: Any) -> Made:
    """A build in INT8, cut before some layers, and what transformers makes of the checkpoint."""
    changes = SHORT.get(model_type, {}) | changes
    checkpoint = tiny_encoders.write_tiny(model_type, folder / "ck", task, **changes)
    chosen: dict[str, Any] = {"buckets": BUCKETS} | ({"answers": ["a", "b"]} if task == RANK else {})
    layers = tiny_encoders.tiny_config(model_type, task, **changes).get_text_config().num_hidden_layers
    chosen |= {"topology": [*pairwise([0, *cuts, layers])]} if cuts else {}
    made = encoders.build(checkpoint, folder / "build", "int8", **chosen)
    source, parts, plan = encoders.parts_of(checkpoint, folder / "again", **chosen)
    weights = checkpoint_weights(source, plan["prefix"])
    known = {"tokens": torch.tensor(TOKENS)}
    reference, head = EncoderReference(source, task), answer_rows(plan, weights)
    for bucket in BUCKETS:
        given = passages(TOKENS, bucket, task), weights, plan["tables"]["embedding"], head
        seen, known[f"output_{bucket}"] = reference.traced(cuts, *given)
        known |= {f"hidden_{bucket}_{layer}": rows for layer, rows in seen.items()}
    return Made(made, source, parts, plan, known)


@pytest.mark.thorough(but=["bert feature-extraction"])
def test_a_right_build_passes(made: Made) -> None:
    rows = [*made.part(16), *made.part(64), *made.stack()]
    measurement.demand("encoder", rows)
    expected = {"weight_steps", "subnormal_steps", "scale_steps", "padding_error", PACKING, "psnr", BUCKET} | IN_FP32
    mismatches = {"label_mismatches"} if IN_FP32 else set()
    by_task = {
        LABEL: {"label_kl", "label_agreement", "span_agreement"} | mismatches,
        CLASSIFY: {"label_kl", "label_agreement"} | mismatches,
        RANK: {"label_kl", "label_agreement"} | mismatches,
        EMBED: {"embedding_cosine"},
    }
    assert {row["name"] for row in rows} == expected | by_task[made.plan["task"]]
    padded = [row["detail"] for row in rows if row["name"] == "padding_error"]
    assert padded == (["", "in fp16"] if IN_FP32 else [""]) * len(BUCKETS)


Rows = Mapping[str, Floats]
CHAINS = [("openai_privacy_filter", LABEL, (1, 2)), ("bert", CLASSIFY, (2,)), ("embedding_gemma2", EMBED, (1,))]
CHAINS += [("gemma3_text", EMBED, (1,))]  # whose stream is scaled


@pytest.fixture(scope="module", params=CHAINS, ids=lambda one: f"{one[0]} {len(one[2]) + 1}")
def chained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A build whose buckets are chains of programs: first, middle and last parts, and one with `embedded`."""
    return build(tmp_path_factory.mktemp("chain"), *request.param)


@pytest.mark.thorough(but=["bert 2"])
def test_every_part_of_a_chain_passes_the_gates_of_an_encoder(chained: Made) -> None:
    parts = {"weight_steps", "subnormal_steps", "scale_steps", "padding_error", PACKING, "psnr"} | IN_FP32
    for place in range(len(chained.chain(16))):
        rows = chained.part(16, place=place)
        measurement.demand("encoder", rows)
        assert {row["name"] for row in rows} == parts
    measurement.demand("encoder", chained.stack())


class Scaled(PartRunner):
    """Gives a little more than the part does."""

    def run(self, rows: Rows, passes: Iterable[Pass]) -> tuple[Floats, Any]:
        return super().run(rows, passes)[0] * np.float32(1.01), {}


@pytest.mark.thorough(but=["bert 2"])
@pytest.mark.skipif(not IN_FP32, reason="shows in fp32, which Core ML does not have")
def test_a_fault_in_any_part_of_a_chain_is_found(chained: Made) -> None:
    for place in range(len(chained.chain(16))):
        assert "program_error" in missed(chained.part(16, Scaled, place))


class Skipping(Encoder):
    """Leaves a program out of the larger bucket's chain."""

    def through(self, texts: Sequence[Floats], bucket: int) -> list[Floats]:
        if bucket > 16 and len(self.programs[bucket]) > 1:
            self.programs[bucket] = dict([*self.programs[bucket].items()][1:])
        return super().through(texts, bucket)


@pytest.mark.thorough(but=["bert 2"])
def test_a_program_that_is_left_out_of_a_chain_is_found(chained: Made) -> None:
    assert BUCKET in missed(chained.stack(Skipping))


@pytest.mark.skipif(not IN_FP32, reason="emulates fp16, which Core ML computes in anyway")
def test_texts_of_every_length_are_transformers_in_fp16(plain: Made) -> None:
    """Zeros fill the rest of a bucket up: of their norm nothing may be NaN, which every token would then be."""
    with load_programs_as("fp16"):
        encoder = Encoder(json.loads((plain.folder / "model.json").read_text()), plain.folder)
    original = checkpoint_weights(plain.source, plain.plan["prefix"])
    weights, text = gates.beside_tables(plain.plan, plain.stored(16), original), tiny_encoders.tiny_text(max(BUCKETS))
    texts = [text[:count] for count in range(1, max(BUCKETS) + 1)]
    expected = plain.reference().run(texts, weights, plain.plan["tables"]["embedding"])
    for bucket in BUCKETS:
        found = np.concatenate([encoder.run(text, bucket) for text in texts[:bucket]])
        assert np.isfinite(found).all(), bucket
        limits.rows_agree(f"texts in a bucket of {bucket}", found, torch.cat(expected[:bucket]), FP16)


def missed(rows: list[dict[str, Any]]) -> set[str]:
    """The numbers that miss their limits."""
    return {row["name"] for row in rows if not row["passed"]}


def missed_where(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """The numbers that miss their limits, each with what was measured."""
    return {(row["name"], row["detail"].partition(";")[0]) for row in rows if not row["passed"]}


def spoilt(precision: str, texts: Sequence[Floats], bucket: int) -> np.float32:
    """A factor: NaN in fp16 for passes of which half or more is zeros."""
    return np.float32(np.nan if precision == "fp16" and 2 * sum(map(len, texts)) <= bucket else 1)


class Leaky(PartRunner):
    """Lets tokens see what fills the bucket up."""

    def run(self, rows: Rows, passes: Iterable[Pass]) -> tuple[Floats, Any]:
        passes = list(passes)
        return super().run(rows, passes)[0] + np.float32(0.01 * passes[0].noise), {}


class Mixing(PartRunner):
    """Takes texts that share a pass for one text."""

    def run(self, rows: Rows, passes: Iterable[Pass]) -> tuple[Floats, Any]:
        return super().run(rows, [together([p.tokens], p.noise) for p in passes])


class Spoiling(PartRunner):
    """Makes NaN of zeros in fp16."""

    def run(self, rows: Rows, passes: Iterable[Pass]) -> tuple[Floats, Any]:
        passes = list(passes)
        factors = [
            spoilt(precision(), [rows["x"][list(text)] for text in p.texts], self.part.spec.tokens) for p in passes
        ]
        return super().run(rows, passes)[0] * np.prod(factors, dtype=np.float32), {}


class Spoilt(Encoder):
    """The same in a runtime."""

    def through(self, texts: Sequence[Floats], bucket: int) -> list[Floats]:
        factor = spoilt(next(iter(self.programs[bucket].values())).precision, texts, bucket)
        return [rows * factor for rows in super().through(texts, bucket)]


class Shifted(Encoder):
    """Puts a text one place further into the larger bucket."""

    def through(self, texts: Sequence[Floats], bucket: int) -> list[Floats]:
        return super().through([np.roll(rows, bucket > 16, axis=0) for rows in texts], bucket)


class Noisy(Encoder):
    """A precision that is far too low."""

    def through(self, texts: Sequence[Floats], bucket: int) -> list[Floats]:
        return [np.round(rows) for rows in super().through(texts, bucket)]


def test_texts_are_cut_into_halves_and_a_single_token(plain: Made) -> None:
    case = plain.case(16)
    assert case.texts == (16, 16, 16, 2) and case.cut is not None
    cut = case.cut()
    assert cut.texts == (*[8] * 6, 1, 1, 1) and cut.rows["x"].shape == (51, case.rows["x"].shape[1])


@pytest.mark.thorough
def test_padding_that_is_seen_is_found(labelling: Made) -> None:
    assert missed(labelling.part(64, Leaky)) == {"padding_error"}


def test_texts_that_see_each_other_are_found(labelling: Made) -> None:
    assert missed(labelling.part(64, Mixing)) == {PACKING}


@pytest.mark.skipif(not IN_FP32, reason="emulates fp16, which Core ML computes in anyway")
def test_zeros_that_only_fp16_makes_nan_of_are_found(labelling: Made) -> None:
    """In fp32 nothing is wrong, and the whole text fills most of its bucket."""
    partly = {("psnr", "half of a bucket, and one token"), ("psnr", "two texts in a bucket")}
    assert missed_where(labelling.part(64, Spoiling)) == {("padding_error", "in fp16"), *partly}
    assert {("label_kl", "bucket 16, 64")} <= missed_where(labelling.stack(Spoilt))


def test_buckets_that_differ_are_found(labelling: Made) -> None:
    assert {BUCKET} | IN_FP32 <= missed(labelling.stack(Shifted))


def test_a_costly_precision_is_found(labelling: Made) -> None:
    assert {"label_kl", "label_agreement", "span_agreement"} <= missed(labelling.stack(Noisy))


@pytest.mark.skipif(not IN_FP32, reason="shows in fp32, which Core ML does not have")
def test_another_checkpoint_is_found(labelling: Made) -> None:
    """Weights that are not those of the package show in the distance and in the program."""
    other = replace(labelling, plan=labelling.plan | {"band": labelling.plan["band"] - 1})
    assert "program_error" in missed(other.part(64))
    with pytest.raises(GateError, match="program_error"):
        measurement.demand("encoder", other.part(64))


def test_what_fills_a_bucket_up_reaches_the_program(labelling: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """With masks that hide nothing, every token sees the noise that stands where a text has ended."""

    def seen(*given: Any) -> dict[str, Any]:
        arrays = encoder_arrays(*given)
        return arrays | {name: np.zeros_like(each) for name, each in arrays.items() if name.startswith("attn_mask")}

    monkeypatch.setattr("shardmill.gates.runner.encoder_arrays", seen)
    assert "padding_error" in missed(labelling.part(64))
