"""Parity of the whole stack: the logits of all parts, chained by the engine, compared with transformers' logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from drafted_decoding import NotFiniteError, Session, run
from drafted_decoding.drafters import PLAIN, Draft, RequestInfo
from drafted_decoding.policies import AlwaysDraft
from kit_runner.figures import relative_error
from torch import Tensor

from shardmill.convert.weights import read_tensor
from shardmill.gates.distributions import clear_agreement, compare_distributions
from shardmill.gates.disturbed import FP16, FP32, probe
from shardmill.gates.drafts import MEASURES, POSITIONS, Expected, draft_agreement
from shardmill.gates.measurement import Margin, Measurement, NotRun, Stretch
from shardmill.gates.naming import Weights
from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import IN_FP32, width_measure
from shardmill.gates.passes import STRETCH, Pass, as_shipped, at_lengths, filled_up, in_passes, sampled, schedules
from shardmill.gates.reference import Reference
from shardmill.gates.stored import WholeModel, transformers_name
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.contract import PER_LAYER
from shardmill.models.sources import undone
from shardmill.plan import Part
from shardmill.runtime.engine import EMBEDDING, Engine, Table
from shardmill.runtime.kv import Floats, token_rows
from shardmill.runtime.program import reused

NEW_TOKENS = 40


class TurningDrafter:
    """A drafter that proposes the true continuation with one wrong token, one place later in each draft, then none.

    Attributes:
        misjudged: number of passes that did not accept exactly the drafts before the wrong one.
    """

    name = "turning"

    def __init__(self, prompt: int, truth: Sequence[int], vocab: int) -> None:
        self.prompt, self.truth, self.vocab = prompt, truth, vocab
        self.turn = self.right = self.misjudged = 0

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """Start again with a draft whose first token is wrong."""
        self.turn = 0

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Draft at most `limit` tokens to follow `context`."""
        done = len(context) - self.prompt
        tokens = list(self.truth[done : done + limit])
        wrong = self.turn % (limit + 1)
        self.turn += 1
        if wrong < len(tokens):
            tokens[wrong] = (tokens[wrong] + 1) % self.vocab
        self.right = min(wrong, len(tokens))
        return Draft(tuple(tokens))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        """Count a pass that did not accept exactly the drafts before the wrong one."""
        self.misjudged += accepted != self.right
        self.right = 0  # a pass without room for drafts calls no `propose`

    def finish(self) -> None:
        """Do nothing: there is nothing to release."""


def decode_one_by_one(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Generate `count` tokens greedily, one token a pass."""
    engine.reset()
    tokens = list(prompt)
    for at in range(len(prompt) + count - 1):
        row = engine.forward([tokens[at]], [at], [at])[0]  # [V]
        if at + 1 == len(tokens):
            tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


def mismatches(engine: Engine, prompt: Sequence[int]) -> tuple[int, str]:
    """Count tokens of a greedy text that drafting changes and passes that misjudge their drafts.

    The second result is a text with the number of accepted drafts.
    """
    count = min(NEW_TOKENS, engine.slots - len(prompt))
    truth = decode_one_by_one(engine, prompt, count)
    drafter = TurningDrafter(len(prompt), truth, engine.vocab)
    engine.reset()
    try:
        generated = run(Session(engine), prompt, max_new_tokens=count, drafter=drafter, policy=AlwaysDraft())
    except NotFiniteError:  # other measurements name the operation
        return count, "the model computed a number that is not finite"
    pairs = zip(generated.tokens, truth, strict=False)
    wrong = sum(a != b for a, b in pairs) + abs(len(truth) - len(generated.tokens))
    return (
        wrong + drafter.misjudged,
        f"{sum(generated.accepted)} of {sum(generated.drafted)} drafts accepted in {count} tokens",
    )


def feed(
    engine: Engine, tokens: Sequence[int], passes: Iterable[Pass], positions: Sequence[int] | None = None
) -> Floats:
    """Return logits [n, vocab] of a sequence that is fed in the given passes, each token into its slot.

    On Core ML a pass whose width the engine does not use is padded as a session pads it.

    Args:
        engine: the engine.
        tokens: the sequence.
        passes: the passes.
        positions: the n positions whose logits are wanted; None for all.
    """
    engine.reset()
    places = {position: i for i, position in enumerate(range(len(tokens)) if positions is None else positions)}
    logits = np.zeros((len(places), engine.vocab), np.float32)
    for p in filled_up(passes, () if is_portable() or engine.pads else engine.widths, engine.slots):
        if p.slots:
            engine.fit(p.slots)
        wanted = [i for i, position in enumerate(p.positions[: p.kept]) if position in places]
        fed = [tokens[i] for i in p.tokens], p.places, p.positions
        if wanted:
            logits[[places[p.positions[i]] for i in wanted]] = engine.forward(*fed)[wanted]
        else:
            engine.write(*fed)
    return logits


@dataclass(frozen=True)
class StoredModel:
    """Transformers' model with the weights that the packages contain."""

    reference: Reference
    weights: Weights
    head: Callable[[], Iterable[Tensor]]  # returns rows [vocab, d] in blocks
    original: Callable[[Tensor, str], Tensor]  # returns the checkpoint's rows for rows of a host's table, by its path

    def logits(self, tokens: Sequence[int], table: Table | Floats, rows: Table | Floats | None = None) -> Tensor:
        """Return the model's logits [n, vocab]; `run` explains the arguments."""
        return self.run(tokens, table, rows)["logits"]

    def run(
        self, tokens: Sequence[int], table: Table | Floats, rows: Table | Floats | None = None
    ) -> dict[str, Tensor]:
        """Return what `Reference.run` returns: the hidden states and the logits.

        Args:
            tokens: the n tokens.
            table: the host's table [vocab, d].
            rows: the host's table of rows for each token and layer, if the model has one, [vocab * layers, P].
        """

        def embedded(ids: Tensor) -> Tensor:
            return self.original(torch.from_numpy(table[ids.numpy()]).float(), EMBEDDING)

        def second(ids: Tensor) -> Tensor:
            assert rows is not None
            of_layers = token_rows(rows, ids.tolist(), rows.shape[0] // table.shape[0])
            whole = np.concatenate([one[0, :, :, 0] for one in of_layers.values()])  # [layers * P, n]
            return self.original(torch.from_numpy(whole.T).float(), PER_LAYER)

        looked_up = None if rows is None else second
        return self.reference.run(tokens, embedded, self.head(), self.weights, looked_up)


def stack_parity(
    load: Callable[[], Engine],
    stored: StoredModel,
    states: Mapping[str, Tensor],
    expected: Callable[[Sequence[int]], Expected | str] | None = None,
) -> Iterator[Measurement | NotRun | Margin | Stretch]:
    """Yield all measurements of the stack; table.py measures the embedding table.

    Args:
        load: builds an engine.
        stored: transformers' model with the packages' weights.
        states: the reference step's output: tokens [n], hidden [layers + 1, positions, d], logits [n, vocab] with
            the original weights; of a recurrence also long_tokens and long_logits.
        expected: returns what the reference of the build's drafter drafts along a text, or why it drafts nothing; None
            without a drafter.
    """
    load = reused(load)
    tokens: list[int] = states["tokens"].tolist()
    compared = tokens[: states["hidden"].shape[1]]
    drafts = expected(compared[:POSITIONS]) if expected else None  # before an engine is loaded
    yield from program_and_widths(load, stored, compared)
    yield from drafted(load, drafts, FP32)
    yield from cost(load, tokens, states["logits"])
    yield from drafted(load, drafts, FP16)
    if "long_tokens" in states:
        yield from cost_along(load, states["long_tokens"].tolist(), states["long_logits"])


def drafted(
    load: Callable[[], Engine], expected: Expected | str | None, precision: str
) -> Iterator[Measurement | NotRun]:
    """Measure the drafter in a precision, if the build has one.

    `expected` is what the drafter's reference drafts, or why it drafts nothing.
    """
    if expected is None:
        return
    reason = IN_FP32 if precision == FP32 and not is_portable() else expected
    if isinstance(reason, str):
        yield NotRun(MEASURES[precision], reason)
        return
    with load_programs_as(precision):
        engine = load()
    yield draft_agreement(engine, reason, precision)


def program_and_widths(
    load: Callable[[], Engine], stored: StoredModel, tokens: Sequence[int]
) -> Iterator[Measurement | NotRun | Margin]:
    """Measure questions 1 and 2.

    The engine and transformers are both large. The engine is idle until transformers has run, and is freed at the end.
    """
    with load_programs_as("fp32"):
        engine = load()
    truth = partial(stored.logits, tokens, engine.table, engine.rows)
    expected = truth()
    probed = probe(stored.reference.model, truth, expected)
    margin = probed.margin
    plain = feed(engine, tokens, in_passes(len(tokens), [1]))
    if is_portable():
        error = Measurement("program_error", relative_error(plain, expected))
        yield explained(error, lambda: feed(engine, tokens, in_passes(len(tokens), [1])), engine)
        yield Measurement("argmax_mismatches", int((plain.argmax(-1) != expected.numpy().argmax(-1)).sum()))
    if probed.hopeless:
        yield NotRun("width_error_fp16", probed.hopeless)
    moving = at_lengths(len(tokens), engine.widths, engine.verify, engine.lengths)
    ways = schedules(len(tokens), engine.verify, engine.tokens_max, engine.pads) | moving
    for name, passes in ({} if probed.hopeless else ways).items():
        some = tokens[: passes[-1].positions[-1] + 1]
        logits, same = feed(engine, some, passes), plain[: len(some)]
        error = Measurement(width_measure(name), relative_error(logits, same), name, probed.allowed)
        yield explained(error, partial(feed, engine, some, passes), engine)
        margin = max(margin, _gaps_apart(logits, same))
    yield Margin(float(f"{margin:.2g}"))
    if is_portable():
        yield Measurement("speculation_mismatches", *mismatches(engine, tokens[: len(tokens) // 2]))


def _gaps_apart(rows: Floats, others: Floats) -> float:
    """Return the largest change of the distance between the two logits that are best in `others`, both [n, vocab]."""
    best = np.argsort(others, axis=-1)[:, -2:]
    first, second = (np.take_along_axis(logits, best, -1) for logits in (rows, others))
    return float(np.abs(np.diff(first) - np.diff(second)).max())


def cost(load: Callable[[], Engine], tokens: Sequence[int], original: Tensor) -> Iterator[Measurement | NotRun]:
    """Measure question 3: the shipped precision against the original weights in fp32, over all n tokens.

    Some models predict the text worse than chance, such as models with random weights or for another language. For
    these, neither the most likely token nor the perplexity shows what INT8 costs, because both jump at random.
    """
    with load_programs_as("fp16"):
        engine = load()

    def fed() -> Floats:
        return feed(engine, tokens, as_shipped(len(tokens), engine.verify, engine.tokens_max, engine.pads))

    following = torch.tensor([*tokens[1:], 0])  # nothing follows the last
    comparison = compare_distributions(original, torch.from_numpy(fed()), following)
    yield explained(Measurement("kl", float(comparison.divergence.mean())), fed, engine)
    # Unlike math.exp, torch's returns inf for a badly broken program.
    before, after = (float(loss[:-1].double().mean().exp()) for loss in (comparison.loss, comparison.shipped_loss))
    if before < original.shape[1]:
        undecided = "the original is decided at no position of this text"
        yield clear_agreement("top1_agreement", comparison, "{} clear positions", undecided)
        yield Measurement("perplexity_ratio", after / before, f"{before:.4g} -> {after:.4g} on {len(tokens)} tokens")
        return
    reason = (
        f"the original's perplexity on this text is {before:.4g}, over its {original.shape[1]} tokens: it can't read it"
    )
    yield from (NotRun(name, reason) for name in ("top1_agreement", "perplexity_ratio"))


def cost_along(load: Callable[[], Engine], tokens: Sequence[int], original: Tensor) -> Iterator[Measurement | Stretch]:
    """Measure question 3 along a long text, in which the errors of a recurrence may add up.

    The threshold of the mean divergence holds here too. How the divergence moves along a text depends on the text as
    well, so nothing limits its growth.

    Args:
        load: builds an engine.
        tokens: the text.
        original: the logits at its positions `sampled`, with the original weights in fp32.
    """
    with load_programs_as("fp16"):
        engine = load()
    positions = sampled(len(tokens))
    fed = partial(feed, engine, tokens, list(in_passes(len(tokens), [engine.tokens_max])), positions)
    divergence = compare_distributions(original, torch.from_numpy(fed())).divergence
    where = f"at {len(positions)} positions of {len(tokens)}"
    yield explained(Measurement("kl", float(divergence.mean()), where), fed, engine)
    for start in range(0, len(tokens), STRETCH) if bool(divergence.isfinite().all()) else ():
        rows = [i for i, position in enumerate(positions) if start <= position < start + STRETCH]
        yield Stretch(positions[rows[0]], positions[rows[-1]] + 1, float(divergence[rows].mean()))


def stored_model(
    reference: Reference, packages: Mapping[str, tuple[Part, Path]], embedding: Part, source: Path, prefix: str
) -> StoredModel:
    """Return transformers' model with the weights of all packages.

    Args:
        reference: the model without weights.
        packages: part and .mlpackage by the part's name.
        embedding: the embedding part.
        source: the checkpoint's folder.
        prefix: begins the checkpoint's names where transformers' begin with "model.".
    """
    tables = {table.path: table for table in embedding.tensors}
    beside = tables[EMBEDDING].beside
    vectors = {transformers_name(one, prefix): read_tensor(one, source) for one in beside}

    def original(rows: Tensor, path: str) -> Tensor:
        return undone(rows, tables[path].source, list(vectors.values()))

    weights = WholeModel([PackageWeights(path, part, prefix) for part, path in packages.values()], vectors)
    return StoredModel(reference, weights, weights.head, original)
