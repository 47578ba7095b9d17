"""Parity of an encoder: each program by itself, then together as in a runtime, on the same three questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from shardmill.figures import psnr, relative_error
from shardmill.gates.distributions import clear_agreement, compare_distributions
from shardmill.gates.disturbed import probe
from shardmill.gates.encoder_reference import EncoderReference, answer_rows, passages
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.naming import Weights
from shardmill.gates.nonfinite import explained
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL, RANK
from shardmill.models.contract import inputs
from shardmill.models.host import Floats, apart, columns, encoder_arrays
from shardmill.models.interface import interface
from shardmill.plan import Part
from shardmill.runtime.encoder import Encoder
from shardmill.runtime.program import Program, reused
from shardmill.runtime.spans import Span, grouped_spans


class EncoderRunner:
    """An encoder's program, run by hand through MLModel.predict."""

    def __init__(self, program: Path, part: Part, plan: Mapping[str, Any]) -> None:
        """Store the arguments; the program is loaded at the first pass.

        Args:
            program: the compiled bundle.
            part: the part that was converted to the program.
            plan: plan.json's content.
        """
        self.program, self.part, self.plan = program, part, plan
        self.loaded = reused(lambda: Program(program, interface(part.blueprint, part.calls)))
        self.names = list(inputs(part.blueprint))

    def run(self, texts: Sequence[Floats], noise: float = 0.0) -> Floats:
        """Return the outputs for texts, given as the host's rows [n, d], with one pass for each text.

        Args:
            texts: the rows of each text.
            noise: the amplitude of random numbers in the columns that the text does not fill.

        Returns:
            One row for each token, or one row for each text if the model classifies whole texts; text after text.
        """
        return self.passes([[rows] for rows in texts], noise)

    def passes(self, passes: Sequence[Sequence[Floats]], noise: float = 0.0) -> Floats:
        """Do the same as `run` for texts that share passes."""
        program, generator, found = self.loaded(), np.random.default_rng(0), []
        for texts in passes:
            counts = [len(rows) for rows in texts]
            x = columns(texts, self.part.tokens)
            rest = x[:, :, sum(counts) :]
            rest[:] = noise * generator.standard_normal(rest.shape)
            given = encoder_arrays(self.plan, self.part.tokens, counts) | {"x": x}
            out = program({name: given[name] for name in self.names})
            kept = 1 if self.plan["task"] == CLASSIFY else None
            found += [rows[:kept] for rows in apart(out[0, : len(self.plan["labels"]) or None, :, 0].T, counts)]
        return np.concatenate(found)


def encoder_parity(
    runner: EncoderRunner,
    reference: EncoderReference,
    tokens: Sequence[int],
    known: Tensor,
    stored: PackageWeights,
    weights: Weights,
) -> Iterator[Measurement]:
    """Yield all measurements of one program; rounding.py measures its weights.

    Args:
        runner: the program.
        reference: transformers' model.
        tokens: the tokens of the parity text.
        known: transformers' outputs for the passages with the original weights, [n, labels or d].
        stored: the package's weights.
        weights: the checkpoint's weights, which contain the host's tables.
    """
    part, task = runner.part, runner.plan["task"]
    texts = passages(tokens, part.tokens, task)
    tables = Tables(runner.plan, weights)
    rows = [tables.rows(text) for text in texts]
    with load_programs_as("fp32"):
        plain = runner.run(rows)

        def truth() -> Tensor:
            return torch.cat(
                reference.run(texts, tables.table, tables.over(stored), stored_answers(runner.plan, stored))
            )

        expected = truth()
        if is_portable():
            error = Measurement("program_error", relative_error(plain, expected))
            yield explained(error, lambda: runner.run(rows), runner.program)
        short = [text[: max(part.tokens // 2, 1)] for text in rows]
        padded = relative_error(runner.run(short, noise=10.0), runner.run(short))
        yield explained(Measurement("padding_error", padded), partial(runner.run, short, 10.0), runner.program)
        halves = [[text[: len(text) // 2], text[len(text) // 2 :]] for text in rows if len(text) > 1]
        if halves:
            packed = relative_error(runner.passes(halves), runner.run([half for text in halves for half in text]))
            name = "packing_error" if is_portable() else "packing_error_fp16"
            within = probe(reference.model, truth, expected).allowed
            yield explained(Measurement(name, packed, allowed=within), partial(runner.passes, halves), runner.program)
    with load_programs_as("fp16"):
        ratio = Measurement("psnr", psnr(runner.run(rows), known))
        yield explained(ratio, lambda: runner.run(rows), runner.program)
        if is_portable():  # Core ML computed in fp16 above, too
            padded = relative_error(runner.run(short, noise=10.0), runner.run(short))
            error = Measurement("padding_error", padded, "in fp16")
            yield explained(error, lambda: (runner.run(short, noise=10.0), runner.run(short)), runner.program)
        yield from _partly_filled(runner, reference, texts, tables)


def _partly_filled(
    runner: EncoderRunner, reference: EncoderReference, texts: Sequence[Sequence[int]], tables: Tables
) -> Iterator[Measurement]:
    """Measure question 3 where texts do not fill the bucket, and where two texts share it.

    What fills a bucket up is zeros, from which fp16 may make NaN where fp32 does not. NaN would spoil every token.
    """
    halves = [half for text in texts for half in (text[: len(text) // 2], text[len(text) // 2 :]) if half]
    cut = [*halves, texts[0][:1]]
    weights, rows = tables.weights, [tables.rows(text) for text in cut]
    original = torch.cat(reference.run(cut, tables.table, weights, answer_rows(runner.plan, weights)))
    pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    ways = {"half of a bucket, and one token": [[one] for one in rows], "two texts in a bucket": pairs}
    for name, passes in ways.items():
        again = partial(runner.passes, passes)
        yield explained(Measurement("psnr", psnr(again(), original), name), again, runner.program)


def stored_answers(plan: Mapping[str, Any], stored: PackageWeights) -> Tensor | None:
    """Return a package's rows of the LM head for the answers, [answers, d]; None if the model ranks nothing."""
    return stored.values("classifier.weight")[: len(plan["labels"])] if plan["task"] == RANK else None


class Tables:
    """The host's tables, read from the checkpoint."""

    def __init__(self, plan: Mapping[str, Any], weights: Weights) -> None:
        self.named: Mapping[str, str] = plan["tables"]  # path -> the checkpoint's tensor name
        self.scale: float = plan["architecture"]["embedding_scale"]
        self.weights = weights

    def table(self, ids: Tensor) -> Tensor:
        """Return rows of the token embedding table."""
        return self.weights(self.named["embedding"])[ids].float()

    def rows(self, text: Sequence[int]) -> Floats:
        """Return the sum of table rows that the host computes for a text, [n, d]."""
        found = self.table(torch.tensor(list(text))) * self.scale
        if "positions" in self.named:
            found = found + self.weights(self.named["positions"])[: len(text)].float()
        if "types" in self.named:
            found = found + self.weights(self.named["types"])[0].float()
        return found.numpy()

    def over(self, stored: Callable[[str], Tensor]) -> Weights:
        """Return a weight lookup with these tables in place of `stored`'s."""
        return lambda name: self.weights(name) if name in self.named.values() else stored(name)


def encoder_stack_parity(
    load: Callable[[], Encoder],
    reference: EncoderReference,
    stored: PackageWeights,
    plan: Mapping[str, Any],
    known: Mapping[str, Tensor],
) -> Iterator[Measurement | NotRun]:
    """Yield all measurements of the programs together as in a runtime; table.py measures the tables.

    Args:
        load: builds a runtime.
        reference: transformers' model.
        stored: the packages' weights.
        plan: plan.json's content.
        known: the reference step's output.
    """
    load = reused(load)
    tokens: list[int] = known["tokens"].tolist()
    with load_programs_as("fp32"):
        encoder = load()
    for bucket in plan["buckets"]:
        texts = passages(tokens, bucket, plan["task"])
        plain = _run_texts(encoder, texts, plan, bucket)
        weights, head = _with_tables(encoder, plan, stored), stored_answers(plan, stored)
        truth = partial(_expected, reference, texts, weights, plan["tables"]["embedding"], head)
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


def _with_tables(encoder: Encoder, plan: Mapping[str, Any], stored: Callable[[str], Tensor]) -> Weights:
    """Return a lookup of the packages' weights and the host's tables, by transformers' names.

    transformers multiplies the rows of its table, where the host's table is multiplied already.
    """
    names, scale = plan["tables"], plan["architecture"]["embedding_scale"]
    tables = {names[path]: torch.from_numpy(table[:]) for path, table in encoder.tables.items()}
    tables[names["embedding"]] = tables[names["embedding"]] / scale
    return lambda name: tables[name] if name in tables else stored(name)


def _expected(
    reference: EncoderReference,
    texts: Sequence[Sequence[int]],
    weights: Weights,
    embedding: str,
    head: Tensor | None,
) -> Tensor:
    """Return transformers' outputs for all texts, concatenated."""
    return torch.cat(reference.run(texts, _rows_of(weights(embedding)), weights, head))


def _rows_of(table: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda ids: table[ids].float()


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
        found = compare_distributions(original, shipped)
        yield Measurement("label_kl", float(found.divergence.mean()), detail)
        undecided = "the original is decided on no label"
        yield clear_agreement("label_agreement", found, f"{detail}, {{}} clear", undecided)
        if plan["task"] == LABEL:
            yield _spans_compared(original, shipped, plan["labels"], found.clear, detail)


def _spans_compared(
    original: Tensor, shipped: Tensor, labels: Sequence[str], clear: Tensor, detail: str
) -> Measurement | NotRun:
    """Measure the share of spans that both find, among those in which the original is decided on every token."""
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
