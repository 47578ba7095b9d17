"""The experts that a program chooses, token by token, compared with transformers' choices.

A program has no output for its choices, so the passes are run again under observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from portable_coreml import trace
from portable_coreml.files.bundle import load_model
from portable_coreml.files.model import pick_function
from portable_coreml.program import Op
from torch import Tensor

from shardmill.errors import GateError
from shardmill.gates.measurement import Measurement
from shardmill.runtime.program import function_location

# An engine that rounds like this cannot tell scores apart whose difference is below this share of the largest score.
RESOLUTION = {"fp32": 2.0**-18, "fp16": 2.0**-7}
LEAST = 32  # fewest tokens on which a program may be judged
FEW = 0.01  # share of all choices: a correct router has at most this share of close calls in fp32


@dataclass(frozen=True)
class Choices:
    """The choices of experts in a part's layers, each field [layers, n, classes]."""

    chosen: Tensor  # 1 for each expert that a token is routed to
    scores: Tensor  # the scores that decided the choice


def chosen_by(program: Path, function: str, layers: int, rerun: Callable[[], object]) -> Choices:
    """Return the experts that a program chooses.

    Args:
        program: the bundle.
        function: the function that runs the passes; "" for a program's only function.
        layers: the number of layers with experts.
        rerun: runs every token once, in order.
    """
    rounds = _rounds(program, function)
    each = len(rounds) // layers  # rounds per layer
    wanted = {name for scores, chosen in rounds for name in (scores, chosen)}
    seen: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def look(name: str, kind: str, value: Tensor) -> None:
        if name in wanted:
            seen[name].append(value.detach().float().flatten(0, 1).flatten(1).T.clone())  # [T, classes]

    with trace(look):
        rerun()
    choices = [torch.cat(seen[chosen]) for _, chosen in rounds]  # each [n, classes]
    taken = [torch.stack(choices[i : i + each]).sum(dim=0) for i in range(0, len(choices), each)]
    return Choices(torch.stack(taken), torch.stack([torch.cat(seen[scores]) for scores, _ in rounds[::each]]))


def _rounds(program: Path, called: str) -> list[tuple[str, str]]:
    """Return, for each round of models/mixture.py's selection, the program's names for its scores and its choice.

    A round subtracts scores from their maximum and multiplies the result with the experts' order. It subtracts the
    product from its maximum, and subtracts a last result from 1: this is the choice.
    """
    path, wanted = function_location(program, called)
    function, _ = pick_function(load_model(path), wanted)
    made: dict[str, Op] = {}
    rounds: list[tuple[str, str]] = []
    scores, ordered = "", False
    for op in function.block.ops:
        made |= {output.name: op for output in op.outputs}
        if op.kind != "sub":
            continue
        first, second = (_maker(op, side, made) for side in "xy")
        name = op.inputs["y"][0]
        if first is not None and first.kind == "reduce_max" and first.inputs["x"][0] == name and isinstance(name, str):
            ordered = second is not None and second.kind == "mul"
            scores = scores if ordered else name
        elif ordered:
            rounds.append((scores, op.outputs[0].name))
            ordered = False
    return rounds


def _maker(op: Op, side: str, made: Mapping[str, Op]) -> Op | None:
    """Return the operation that produces an argument."""
    name = op.inputs[side][0]
    return made.get(name) if isinstance(name, str) else None


@dataclass(frozen=True)
class ChoiceComparison:
    """A program's choices beside transformers' choices, each field [layers, n]."""

    same: Tensor  # True if the sets of experts are equal
    close: Tensor  # True if the scores leave the choice open
    edge: Tensor  # True if SparseMixer's softmax membership is within rounding of its limit; the sets do not show it

    @property
    def fell(self) -> Tensor:
        """Return the close calls that were decided differently."""
        return self.close & ~self.same

    def decided(self, wrong: Tensor) -> int:
        """Return the number of tokens before the first close call that was decided differently.

        After it the two models compute with different values, and neither is wrong. All tokens count if close calls are
        frequent.

        Args:
            wrong: True for each token whose output differs, [n]. A token with an expert on the edge counts as decided
                differently only if its output differs.

        Raises:
            GateError: if there is such a call, and too few tokens before it to judge a program.
        """
        tokens = torch.nonzero(self.fell.any(dim=0) | (self.edge.any(dim=0) & wrong))
        few = float(self.close.float().mean()) <= FEW
        count = int(tokens[0]) if len(tokens) and few else len(wrong)
        if count < min(LEAST, len(wrong)):
            raise GateError(
                f"a close call between experts was decided differently at token {count} of {len(wrong)}: only tokens "
                f"before it can be compared, and at least {LEAST} are needed; name another text in `parity.text`"
            )
        return count

    def before(self, count: int) -> ChoiceComparison:
        """Return the choices of the first `count` tokens."""
        return ChoiceComparison(self.same[:, :count], self.close[:, :count], self.edge[:, :count])


def compare_choices(choices: Choices, indices: list[Tensor], precision: str, jitter: float = 0.0) -> ChoiceComparison:
    """Compare a program's choices with transformers' choices.

    Args:
        choices: the program's choices.
        indices: the experts of each layer, as returned by gates/routed.py.
        precision: the precision in which the program computed.
        jitter: SparseMixer's eps; 0 for any other router.
    """
    count, chosen = choices.chosen.shape[2], indices[0].shape[1]
    truth = torch.stack([_sets(index, count) for index in indices])
    ordered = choices.scores.sort(dim=2, descending=True).values
    size = choices.scores.abs().amax(dim=2)
    close = torch.zeros_like(size, dtype=torch.bool)
    if chosen < count:  # otherwise there is nothing to choose; NaN is no close call
        close = (ordered[..., chosen - 1] - ordered[..., chosen]) <= RESOLUTION[precision] * size
    edge = _on_edge(choices.scores, jitter, RESOLUTION[precision]) if jitter else torch.zeros_like(close)
    return ChoiceComparison((truth == choices.chosen).all(dim=2) & ~choices.scores.isnan().any(dim=2), close, edge)


def _on_edge(scores: Tensor, jitter: float, resolution: float) -> Tensor:
    """Return whether an expert is at SparseMixer's limit for sharing a softmax: [layers, n].

    Source: transformers, models/phimoe/modeling_phimoe.py. It selects two experts in turn, the second among the rest.
    """
    on_edge = torch.zeros(scores.shape[:2], dtype=torch.bool)
    left, size = scores, scores.abs().amax(dim=2, keepdim=True)
    for _ in range(2):
        best = left.amax(dim=2, keepdim=True)
        beyond = (best - left) - 2 * jitter * torch.maximum(left.abs(), best)
        on_edge |= (beyond.abs() <= resolution * size).any(dim=2)
        left = left.masked_fill(left == best, -torch.inf)
    return on_edge


def choice_agreement(name: str, comparison: ChoiceComparison) -> Measurement:
    """Measure the share of tokens and layers with the same set of experts as transformers, if the scores decide it."""
    same, close = comparison.same, comparison.close
    apart = close | _after(comparison.fell)
    counted = same[~apart] if bool((~apart).any()) else same
    detail = f"{int(close.sum())} of {close.numel()} choices are close calls"
    if later := int((apart & ~close).sum()):
        detail += f", {later} come after one that fell otherwise"
    return Measurement(name, float(counted.float().mean()), detail)


def _after(fell: Tensor) -> Tensor:
    """Return the choices [layers, n] of a token in layers after a close call that was decided differently.

    There the token's hidden state is different, so it may well be routed to other experts.
    """
    return (fell.int().cumsum(dim=0) - fell.int()) > 0


def _sets(index: Tensor, count: int) -> Tensor:
    """Return indices [n, chosen] as a mask [n, classes]; a token without experts gets the last class."""
    mask = torch.zeros(len(index), count)
    return mask.scatter(1, torch.where(index < 0, count - 1, index), 1.0)
