"""Parity of an encoder: each program by itself, then together as in a runtime, on the same three questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from kit_runner.figures import psnr, relative_error
from torch import Tensor
from torch.nn.functional import cosine_similarity

from shardmill.gates.case import Case
from shardmill.gates.distributions import clear_agreement, compare_distributions
from shardmill.gates.disturbed import probe
from shardmill.gates.encoder_reference import EncoderReference, answer_rows, passages
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.naming import Weights
from shardmill.gates.nonfinite import explained
from shardmill.gates.passes import one_by_one, spans_of, together
from shardmill.gates.runner import PartRunner
from shardmill.gates.stored import StoredWeights, WholeModel
from shardmill.gates.thresholds import Allowed
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL, RANK
from shardmill.models.part_kinds import pass_inputs
from shardmill.plan import Part
from shardmill.runtime.encoder import EMBEDDED, Encoder
from shardmill.runtime.engine import Table
from shardmill.runtime.kv import Floats
from shardmill.runtime.program import reused
from shardmill.runtime.spans import Span, grouped_spans


def encoder_case(
    part: Part,
    plan: Mapping[str, Any],
    reference: EncoderReference,
    texts: Sequence[Sequence[int]],
    known: Mapping[str, Tensor],
    stored: StoredWeights,
    weights: Weights,
) -> Case:
    """Return the case of texts that an encoder, or a part of one, reads.

    Args:
        part: the part.
        plan: plan.json's content.
        reference: transformers' model.
        texts: the tokens of each text.
        known: transformers' results for the texts with the original weights: the outputs [n, labels or d] as `output`
            and the inputs [n, d] of the part's first layer and of the layer after its last one, as `Part.edge` calls
            them. The first part's inputs and the last part's end need none.
        stored: the package's weights.
        weights: the checkpoint's weights, which contain the host's tables.
    """
    table, last = plan["tables"]["embedding"], part.end == len(reference.layers)
    all_weights = beside_tables(plan, part_weights(part, reference, stored, weights), weights)
    scale = part.spec.graph.stream_scale
    before = known[part.edge(part.start)] if part.start else None
    original = known["output"] if last else known[part.edge(part.end)] * scale

    def expected() -> list[Tensor]:
        answers = stored_answers(plan, stored) if last else None
        outputs = reference.between(part.start, part.end, before, texts, all_weights, table, answers)
        return [outputs if last else outputs * scale]

    def cut() -> Case:
        halves = [half for text in texts for half in (text[: len(text) // 2], text[len(text) // 2 :]) if half]
        pieces = [*halves, texts[0][:1]]
        edges = [layer for layer in (part.start, part.end) if 0 < layer < len(reference.layers)]
        seen, outputs = reference.traced(edges, pieces, weights, table, answer_rows(plan, weights))
        again = {"output": outputs, **{part.edge(layer): rows for layer, rows in seen.items()}}
        return encoder_case(part, plan, reference, pieces, again, stored, weights)

    host, counts = np.concatenate([_host_rows(plan, weights, text) for text in texts]), tuple(map(len, texts))
    rows = {"x": host if before is None else (before * scale).numpy()}
    rows |= {EMBEDDED: host} if EMBEDDED in pass_inputs(part.spec) else {}
    return Case(rows, expected, lambda: [original], reference.model, texts=counts, cut=cut)


def part_weights(part: Part, reference: EncoderReference, stored: StoredWeights, weights: Weights) -> Weights:
    """Return a lookup of a package's weights, and of the checkpoint's for what other parts hold."""
    whole = not part.start and part.end == len(reference.layers)  # and must hold every weight
    return stored if whole else stored.over(weights)


def known_of(part: Part, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the reference step knows of an encoder's part, as `encoder_case` takes it."""
    edges = {name: known[name] for name in (part.edge(part.start), part.edge(part.end)) if name in known}
    return {"output": known[f"output_{part.spec.tokens}"], **edges}


def texts_apart(runner: PartRunner, case: Case, within: Allowed) -> Iterator[Measurement]:
    """Measure question 2: neither what fills a bucket up nor another text in it changes the output for a text.

    Args:
        runner: runs the part's program.
        case: the texts.
        within: how far apart the results may be if texts share a pass.
    """
    yield _padding(runner, case)
    halves = [(span[: len(span) // 2], span[len(span) // 2 :]) for span in spans_of(case.texts) if len(span) > 1]
    if halves:
        again = partial(runner.run, case.rows, [together(pair) for pair in halves])
        alone, _ = runner.run(case.rows, [together([half]) for pair in halves for half in pair])
        name = "packing_error" if is_portable() else "packing_error_fp16"
        error = Measurement(name, relative_error(again()[0], alone), allowed=within)
        yield explained(error, again, runner.program)


def texts_in_fp16(runner: PartRunner, case: Case) -> Iterator[Measurement]:
    """Measure questions 2 and 3 in fp16, where texts do not fill the bucket, and where two texts share it.

    What fills a bucket up is zeros, from which fp16 may make NaN where fp32 does not. NaN would spoil every token.
    """
    if is_portable():  # Core ML computes in fp16 in `texts_apart`, too
        yield _padding(runner, case, "in fp16")
    assert case.cut is not None
    cut = case.cut()
    (original,), spans = cut.original(), spans_of(cut.texts)
    pairs = [together(spans[at : at + 2]) for at in range(0, len(spans), 2)]
    ways = {"half of a bucket, and one token": one_by_one(cut.texts), "two texts in a bucket": pairs}
    for name, passes in ways.items():
        again = partial(runner.run, cut.rows, passes)
        yield explained(Measurement("psnr", psnr(again()[0], original), name), again, runner.program)


def _padding(runner: PartRunner, case: Case, detail: str = "") -> Measurement:
    """Measure what noise in place of zeros changes, after texts of at most half of the bucket."""
    short = [span[: max(runner.part.spec.tokens // 2, 1)] for span in spans_of(case.texts)]

    def run(noise: float) -> Floats:
        return runner.run(case.rows, [together([span], noise) for span in short])[0]

    error = Measurement("padding_error", relative_error(run(10.0), run(0.0)), detail)
    return explained(error, lambda: (run(10.0), run(0.0)), runner.program)


def _together(reference: EncoderReference, *arguments: Any) -> Tensor:
    """Return transformers' outputs for all texts, see `EncoderReference.run`: one text after the other."""
    return torch.cat(reference.run(*arguments))


def stored_answers(plan: Mapping[str, Any], stored: StoredWeights) -> Tensor | None:
    """Return a package's rows of the LM head for the answers, [answers, d]; None if the model ranks nothing."""
    return stored.values("classifier.weight")[: len(plan["labels"])] if plan["task"] == RANK else None


def _host_rows(plan: Mapping[str, Any], weights: Weights, text: Sequence[int]) -> Floats:
    """Return the sum of table rows that the host computes for a text, [n, d], from the checkpoint's tables."""
    named: Mapping[str, str] = plan["tables"]  # path -> the checkpoint's tensor name
    ids, scale = torch.tensor(list(text)), plan["architecture"]["embedding_scale"]
    sums: Tensor = weights(named["embedding"])[ids].float() * scale
    if "positions" in named:
        sums = sums + weights(named["positions"])[: len(text)].float()
    if "types" in named:
        sums = sums + weights(named["types"])[0].float()
    return sums.numpy()


def beside_tables(plan: Mapping[str, Any], stored: Callable[[str], Tensor], weights: Weights) -> Weights:
    """Return a lookup of stored weights, and of the host's tables among the checkpoint's weights."""
    return lambda name: weights(name) if name in plan["tables"].values() else stored(name)


def encoder_stack_parity(
    load: Callable[[], Encoder],
    reference: EncoderReference,
    all_stored: Sequence[StoredWeights],
    plan: Mapping[str, Any],
    known: Mapping[str, Tensor],
) -> Iterator[Measurement | NotRun]:
    """Yield all measurements of the programs together as in a runtime; table.py measures the tables.

    Args:
        load: builds a runtime.
        reference: transformers' model.
        all_stored: the weights of the packages of one bucket, in order.
        plan: plan.json's content.
        known: the reference step's output.
    """
    load, stored = reused(load), WholeModel(all_stored)
    tokens: list[int] = known["tokens"].tolist()
    with load_programs_as("fp32"):
        encoder = load()
    for bucket in plan["buckets"]:
        texts = passages(tokens, bucket, plan["task"])
        plain = _run_texts(encoder, texts, plan, bucket)
        all_weights, answers = with_tables(encoder.tables, plan, stored), stored_answers(plan, all_stored[-1])
        truth = partial(_together, reference, texts, all_weights, plan["tables"]["embedding"], answers)
        expected = truth()
        if is_portable():
            yield Measurement("program_error", relative_error(plain, expected), f"bucket {bucket}")
            if plan["labels"]:
                wrong = int((plain.argmax(-1) != expected.numpy().argmax(-1)).sum())
                yield Measurement("label_mismatches", wrong, f"bucket {bucket}")
        larger = [size for size in plan["buckets"] if size > bucket]
        within = probe(reference.model, truth, expected).allowed if larger else None
        for other in larger:
            error = relative_error(_run_texts(encoder, texts, plan, other), plain)
            name = "bucket_error" if is_portable() else "bucket_error_fp16"
            yield Measurement(name, error, f"{bucket}, {other}", within)
    del encoder
    yield from _encoder_cost(load, plan, known)


def with_tables(tables: Mapping[str, Table], plan: Mapping[str, Any], stored: Callable[[str], Tensor]) -> Weights:
    """Return a lookup of the packages' weights and the host's tables, by transformers' names.

    transformers multiplies the rows of its table, where the host's table is multiplied already.
    """
    names, scale = plan["tables"], plan["architecture"]["embedding_scale"]
    known = {names[path]: torch.from_numpy(table[:]) for path, table in tables.items()}
    known[names["embedding"]] = known[names["embedding"]] / scale
    return lambda name: known[name] if name in known else stored(name)


def _run_texts(encoder: Encoder, texts: Sequence[Sequence[int]], plan: Mapping[str, Any], bucket: int) -> Floats:
    """Return the outputs for all texts, concatenated."""
    outputs = [encoder.run(text, bucket) for text in texts]
    return np.concatenate([out[:1] if plan["task"] == CLASSIFY else out for out in outputs])


def _encoder_cost(
    load: Callable[[], Encoder], plan: Mapping[str, Any], known: Mapping[str, Tensor]
) -> Iterator[Measurement | NotRun]:
    """Measure question 3: the shipped precision against the original weights in fp32.

    The texts of each bucket run in that bucket, which they fill, and in the largest one.
    """
    with load_programs_as("fp16"):
        encoder = load()
    pairs = [(bucket, taken) for bucket in plan["buckets"] for taken in {bucket: 0, max(plan["buckets"]): 0}]
    for bucket, taken in pairs:
        texts = passages(known["tokens"].tolist(), bucket, plan["task"])
        shipped = torch.from_numpy(_run_texts(encoder, texts, plan, taken))
        original, detail = known[f"output_{bucket}"], f"bucket {bucket}"
        detail += f", {taken}" if taken != bucket else ""
        if plan["task"] == EMBED:
            likeness = cosine_similarity(original, shipped, dim=-1)
            yield Measurement("embedding_cosine", float(likeness.min()), detail)
            continue
        comparison = compare_distributions(original, shipped)
        yield Measurement("label_kl", float(comparison.divergence.mean()), detail)
        undecided = "the original is decided on no label"
        yield clear_agreement("label_agreement", comparison, f"{detail}, {{}} clear", undecided)
        if plan["task"] == LABEL:
            yield _spans_compared(original, shipped, plan["labels"], comparison.clear, detail)


def _spans_compared(
    original: Tensor, shipped: Tensor, labels: Sequence[str], clear: Tensor, detail: str
) -> Measurement | NotRun:
    """Measure the share of spans that both find, among the spans in which the original is decided on every token."""
    ours, theirs = (set(spans(x, labels, clear)) for x in (shipped, original))
    if not ours | theirs:
        return NotRun("span_agreement", "the original is sure of no span in this text")
    share = len(ours & theirs) / len(ours | theirs)
    return Measurement("span_agreement", share, f"{detail}, {len(theirs)} spans")


def spans(logits: Tensor, labels: Sequence[str], clear: Tensor) -> Iterator[tuple[int, int, str]]:
    """Yield the first and last token and the type of every span whose tokens and neighbours are all clear."""
    rows = [Span(i, i + 1, labels[row], 1.0) for i, row in enumerate(logits.argmax(-1).tolist())]
    for span in grouped_spans(rows):
        if bool(clear[max(span.start - 1, 0) : span.end + 1].all()):
            yield span.start, span.end, span.type
