"""Parity of the whole stack: the parts chained by the engine, against transformers, in logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from shardmill.engine import Engine, Floats
from shardmill.gates.parity import relative_error, width_measure
from shardmill.gates.passes import Pass, cut, schedules
from shardmill.gates.reference import Reference, Weights, run
from shardmill.gates.thresholds import Measurement
from shardmill.gates.weights import PackageWeights
from shardmill.host import is_portable, load_programs_as
from shardmill.plan import Part

CLEAR_MARGIN = 0.1  # nat: below it the two best tokens are as good as equal


def feed(engine: Engine, tokens: Sequence[int], passes: Iterable[Pass]) -> Floats:
    """Logits [n, vocab] of a sequence fed in the given passes, slot = position."""
    engine.reset()
    logits = np.zeros((len(tokens), engine.vocab), np.float32)
    for p in passes:
        rows = engine.forward([tokens[i] for i in p.tokens], p.positions, p.positions)
        logits[list(p.positions[: p.kept])] = rows[: p.kept]
    return logits


def stack_parity(
    load: Callable[[], Engine], reference: Reference, weights: Weights, states: Mapping[str, Tensor], head: Tensor
) -> Iterator[Measurement]:
    """All measurements of the stack.

    Args: load makes an engine; weights and head [vocab, d] dequantised from the packages; states what the reference
    step wrote: tokens [n], hidden [layers + 1, positions, d], logits [n, vocab] with the original weights.
    """
    tokens: list[int] = states["tokens"].tolist()
    short = tokens[: states["hidden"].shape[1]]
    with load_programs_as("fp32"):
        engine = load()
    plain = feed(engine, short, cut(len(short), [1]))
    if is_portable():
        table = torch.from_numpy(engine.table.astype(np.float32))
        expected = run(reference, short, table, head, weights)["logits"]
        yield Measurement("program_error", relative_error(plain, expected))
        yield Measurement("argmax_mismatches", int((plain.argmax(-1) != expected.numpy().argmax(-1)).sum()))
    for name, passes in schedules(len(short), engine.max_tokens).items():
        yield Measurement(width_measure(name), relative_error(feed(engine, short, passes), plain), name)
    yield from cost(load, tokens, states["logits"])


def cost(load: Callable[[], Engine], tokens: Sequence[int], original: Tensor) -> Iterator[Measurement]:
    """Question 3: the shipped precision against the original weights in fp32, over all n tokens."""
    with load_programs_as("fp16"):
        engine = load()
    shipped = torch.from_numpy(feed(engine, tokens, cut(len(tokens), [engine.max_tokens])))
    p, q = log_softmax(original, -1), log_softmax(shipped, -1)
    yield Measurement("kl", float(kl_div(q, p, reduction="batchmean", log_target=True)))
    yield top1(p, q)
    targets = torch.tensor(tokens[1:])
    before, after = (math.exp(float(cross_entropy(x[:-1], targets))) for x in (original, shipped))
    yield Measurement("perplexity_ratio", after / before, f"{before:.4g} -> {after:.4g} on {len(tokens)} tokens")


def top1(original: Tensor, shipped: Tensor) -> Measurement:
    """Agreement of the most likely token where the original's margin is clear. Args: log-probabilities [n, vocab]."""
    best = original.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] >= CLEAR_MARGIN
    same = original.argmax(-1) == shipped.argmax(-1)
    close = f"{int(same[~clear].sum())} of {int((~clear).sum())} others agree"
    return Measurement(
        "top1_agreement", float(same[clear].float().mean()), f"{int(clear.sum())} clear positions; {close}"
    )


def stored_weights(packages: Mapping[str, tuple[Part, Path]]) -> tuple[Weights, Tensor]:
    """(layer and norm weights by the checkpoint's names, the LM head [vocab, d]), dequantised from all packages."""
    owners: dict[str, PackageWeights] = {}
    slices = []
    for part, path in packages.values():
        stored = PackageWeights(path, part)
        if part.kind == "head":
            slices.append(stored(part.tensors[1].name.split("[")[0]))
        owners.update(dict.fromkeys((t.name for t in part.tensors), stored))
    return lambda name: owners[name](name), torch.cat(slices)
