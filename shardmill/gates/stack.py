"""Parity of the whole stack: the logits of all parts, chained by the engine, against those of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import relative_error, width_measure
from shardmill.gates.passes import Pass, cut, schedules
from shardmill.gates.reference import Reference, Weights, run
from shardmill.gates.speculation import mismatches
from shardmill.gates.thresholds import Measurement, NotRun
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.plan import Part
from shardmill.runtime.engine import Engine, Floats

CLEAR_MARGIN = 0.1  # nat: below it the two best tokens are as good as equal


def feed(engine: Engine, tokens: Sequence[int], passes: Iterable[Pass]) -> Floats:
    """Logits [n, vocab] of a sequence that is fed in the given passes, each token into the slot of its position."""
    engine.reset()
    logits = np.zeros((len(tokens), engine.vocab), np.float32)
    for p in passes:
        rows = engine.forward([tokens[i] for i in p.tokens], p.positions, p.positions)
        logits[list(p.positions[: p.kept])] = rows[: p.kept]
    return logits


def stack_parity(
    load: Callable[[], Engine],
    reference: Reference,
    weights: Weights,
    states: Mapping[str, Tensor],
    head: Iterable[Tensor],
) -> Iterator[Measurement | NotRun]:
    """All measurements of the stack but that of the embedding table (table.py).

    Args:
        load: makes an engine.
        reference: transformers' decoder.
        weights: the weights of layers and norm, dequantised from the packages.
        states: what the reference step wrote: tokens [n], hidden [layers + 1, positions, d] and logits [n, vocab], with
            the original weights.
        head: the LM head's rows, [vocab, d] in blocks, dequantised from the packages.
    """
    tokens: list[int] = states["tokens"].tolist()
    yield from program_and_widths(load, reference, weights, tokens[: states["hidden"].shape[1]], head)
    yield from cost(load, tokens, states["logits"])


def program_and_widths(
    load: Callable[[], Engine], reference: Reference, weights: Weights, tokens: Sequence[int], head: Iterable[Tensor]
) -> Iterator[Measurement]:
    """Questions 1 and 2.

    The engine runs nothing before transformers is done, and is gone when this ends: both take much memory.
    """
    with load_programs_as("fp32"):
        engine = load()
    if is_portable():
        expected = run(reference, tokens, torch.from_numpy(engine.table), head, weights)["logits"]
    plain = feed(engine, tokens, cut(len(tokens), [1]))
    if is_portable():
        error = Measurement("program_error", relative_error(plain, expected))
        yield explained(error, lambda: feed(engine, tokens, cut(len(tokens), [1])), engine)
        yield Measurement("argmax_mismatches", int((plain.argmax(-1) != expected.numpy().argmax(-1)).sum()))
    for name, passes in schedules(len(tokens), engine.max_tokens).items():
        error = Measurement(width_measure(name), relative_error(feed(engine, tokens, passes), plain), name)
        yield explained(error, partial(feed, engine, tokens, passes), engine)
    if is_portable():
        yield Measurement("speculation_mismatches", *mismatches(engine, tokens[: len(tokens) // 2]))


def cost(load: Callable[[], Engine], tokens: Sequence[int], original: Tensor) -> Iterator[Measurement | NotRun]:
    """Question 3: the shipped precision against the original weights in fp32, over all n tokens.

    Some models predict the text worse than chance: those with random weights, or made for another language. Of these,
    neither the most likely token nor the perplexity tells what INT8 costs, for both jump at random.
    """
    with load_programs_as("fp16"):
        engine = load()

    def fed() -> Floats:
        return feed(engine, tokens, cut(len(tokens), [engine.max_tokens]))

    shipped = torch.from_numpy(fed())
    p, q = log_softmax(original, -1), log_softmax(shipped, -1)
    divergence = Measurement("kl", float(kl_div(q, p, reduction="batchmean", log_target=True)))
    yield explained(divergence, fed, engine)
    targets = torch.tensor(tokens[1:])
    before, after = (math.exp(float(cross_entropy(x[:-1], targets))) for x in (original, shipped))
    if before < original.shape[1]:
        yield top1(p, q)
        yield Measurement("perplexity_ratio", after / before, f"{before:.4g} -> {after:.4g} on {len(tokens)} tokens")
        return
    reason = (
        f"the original's perplexity on this text is {before:.4g}, over its {original.shape[1]} tokens: it can't read it"
    )
    yield from (NotRun(name, reason) for name in ("top1_agreement", "perplexity_ratio"))


def top1(original: Tensor, shipped: Tensor) -> Measurement:
    """Agreement on the most likely token where the original's margin is clear. Takes log-probabilities [n, vocab]."""
    best = original.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] >= CLEAR_MARGIN
    same = original.argmax(-1) == shipped.argmax(-1)
    close = f"{int(same[~clear].sum())} of {int((~clear).sum())} others agree"
    return Measurement(
        "top1_agreement", float(same[clear].float().mean()), f"{int(clear.sum())} clear positions; {close}"
    )


def stored_weights(packages: Mapping[str, tuple[Part, Path]]) -> tuple[Weights, Iterator[Tensor]]:
    """The weights of all packages, dequantised: those of layers and norm by name, and the LM head's rows in blocks."""
    stored = [(part, PackageWeights(path, part)) for part, path in packages.values()]
    owners = {tensor.name: weights for part, weights in stored for tensor in part.tensors}
    heads = [(weights, part.tensors[1].name.split("[")[0]) for part, weights in stored if part.kind == "head"]
    return lambda name: owners[name](name), (rows for weights, name in heads for rows in weights.rows(name))
