"""Whether a drafter's programs, as a chain, draft what transformers' reference of the drafter drafts.

The gates of its parts feed each with the reference's own input. What a runtime does between the parts shows only here:
which layers it taps, which slots it reads, from where on the drafter reads its own output, which token a row of its LM
head stands for, and what it sees of the model's caches. So the drafts are made as a runtime makes them, along a text of
which every pass accepts some drafts and has to take back the others.

The reference has the packages' weights. It computes in fp32, and anew for each draft: it has no cache that could be
wrong in the same way. A token whose two best logits rounding may exchange is a near tie, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from drafted_decoding import NotFiniteError, Session, create_drafter
from numpy.typing import NDArray
from torch import Tensor, nn

from shardmill.gates.disturbed import FP16, FP32, NOISE, Probe, disturbed
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.reference import ReferenceDrafter
from shardmill.machine import is_portable
from shardmill.runtime.drafter import load_drafter
from shardmill.runtime.engine import Engine

POSITIONS = 64  # tokens of the text: what the reference computes for a draft grows with the text before it
DRAFTS = 3  # tokens of a draft, if passes take as many: one, and two that follow the drafter's own output
MEASURES = {FP32: "drafts_agreement", FP16: "drafts_agreement_fp16"}
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Expected:
    """The reference's drafts along a text.

    Attributes:
        kind: the drafter's kind.
        tokens: the text.
        verify: the most tokens of a decode pass.
        drafts: the drafts, [rounds, steps].
        gaps: how far apart the two best logits of each token are, [rounds, steps].
        margins: by precision, how far apart two logits may be that rounding exchanges.
    """

    kind: str
    tokens: Sequence[int]
    verify: int
    drafts: Ids
    gaps: NDArray[np.float64]
    margins: dict[str, float]


def rounds(count: int, verify: int) -> Iterator[tuple[int, int]]:
    """Yield the length of the context of each draft along a text, and how many of the draft's tokens are accepted.

    The accepted numbers take turns, from none to all, whatever was drafted.

    Args:
        count: tokens of the text.
        verify: the most tokens of a decode pass: the newest token, and drafts.
    """
    at, turn = max(2, count // 4), 0
    while at + verify <= count:
        accepted = turn % (steps(verify) + 1)
        yield at, accepted
        at, turn = at + accepted + 1, turn + 1


def steps(verify: int) -> int:
    """Return how many tokens a draft has, for passes of up to `verify` tokens; 0 if they have no room for drafts."""
    return min(DRAFTS, verify - 1)


@torch.no_grad()
def expected_drafts(
    drafter: ReferenceDrafter,
    run: Callable[[], Tensor],
    model: nn.Module,
    tokens: Sequence[int],
    verify: int,
    scale: float,
) -> Expected:
    """Return what the reference drafts, and which logits rounding may exchange.

    In fp32 only what the model hands to the drafter is rounded to fp16, and in fp16 everything is.

    Args:
        drafter: the reference.
        run: returns the model's hidden states for the tokens, [layers + 1, n, d].
        model: transformers' model, which `run` calls.
        tokens: the text.
        verify: the most tokens of a decode pass, at least 2.
        scale: the factor that the hidden states have in programs.
    """

    def along(hidden: Tensor, drafts: Ids | None = None) -> tuple[Ids, Tensor]:
        draft, drafted, rows = drafter.begin(hidden), list[list[int]](), list[Tensor]()
        for i, (at, _) in enumerate(rounds(len(tokens), verify)):
            following, token = draft(tokens[:at]), None
            drafted.append([])
            for step in range(steps(verify)):
                rows.append(next(following) if token is None else following.send(token))
                likeliest = int(drafter.ids[int(rows[-1].argmax())])
                token = likeliest if drafts is None else int(drafts[i, step])
                drafted[-1].append(token)
        return np.array(drafted), torch.stack(rows)

    hidden, noise = run(), FP32 if is_portable() else FP16
    drafts, exact = along(hidden)
    _, handed = along((hidden * scale).half().float() / scale, drafts)
    with ExitStack() as stack:
        for module in (model, *drafter.modules):
            stack.enter_context(disturbed(module, NOISE[noise]))
        _, noisy = along(run(), drafts)
    best = exact.double().topk(2, dim=-1).values
    gaps = (best[:, 0] - best[:, 1]).reshape(drafts.shape).numpy()
    margins = {FP32: Probe(exact, handed, FP16, 0).margin, FP16: Probe(exact, noisy, noise, 0).margin}
    return Expected(drafter.kind, tokens, verify, drafts, gaps, margins)


def draft_agreement(engine: Engine, expected: Expected, precision: str) -> Measurement | NotRun:
    """Measure how many of the reference's tokens the programs draft, if they are no near ties.

    A draft is compared up to the first token that differs, since what follows it follows another token.

    Args:
        engine: the model's engine, with its drafter's programs beside it.
        expected: the reference's drafts.
        precision: the precision in which the programs compute.
    """
    drafted = _drafted(engine, expected)
    clear, right, first, ties = 0, 0, [0, 0], 0
    for draft, truth, gaps in zip(drafted, expected.drafts.tolist(), expected.gaps.tolist(), strict=True):
        for step, (token, gap) in enumerate(zip(truth, gaps, strict=True)):
            same, is_tie = draft[step : step + 1] == [token], gap <= expected.margins[precision]
            ties += is_tie
            if not is_tie:
                clear, right = clear + 1, right + same
                first = [first[0] + same, first[1] + 1] if step == 0 else first
            if not same:
                break
    name = MEASURES[precision]
    if not clear:
        return NotRun(name, "every draft of the reference is a near tie on this text")
    detail = f"{first[0]} of {first[1]} first tokens and {right} of {clear} in all; {ties} near ties"
    return Measurement(name, right / clear, detail)


def _drafted(engine: Engine, expected: Expected) -> list[list[int]]:
    """Return the programs' drafts along the text, where each pass accepts what `rounds` says.

    From the first pass on whose result is not finite, drafts are empty.
    """
    tokens, most = list(expected.tokens), steps(expected.verify)
    session, drafter = Session(engine), create_drafter(expected.kind, head=load_drafter(engine))
    drafts: list[list[int]] = []
    try:
        for at, accepted in rounds(len(tokens), expected.verify):
            if not drafts:
                session.prefill(tokens[: at - 1])
                drafter.reset(tokens[: at - 1])
                drafter.observe(tokens[at - 1 : at], 0)
            drafts.append(list(drafter.propose(tokens[:at], most).tokens))
            wrong = [(token + 1) % engine.vocab for token in tokens[at + accepted : at + most]]
            session.feed([*tokens[at - 1 : at + accepted], *wrong])
            session.commit(1 + accepted)
            drafter.observe(tokens[at : at + accepted + 1], accepted)
    except NotFiniteError:  # other measurements name the operation
        pass
    return drafts + [[]] * (len(expected.drafts) - len(drafts))
