"""Which experts a program chooses, token by token, against those that transformers chooses.

A program's choice is no output of it: the passes are fed once more, observed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from portable_coreml import trace
from portable_coreml.files.load import load_model
from portable_coreml.files.model import pick_function
from portable_coreml.program import Op
from torch import Tensor

from shardmill.errors import GateError
from shardmill.gates.measurement import Measurement
from shardmill.runtime.functions import located

# Scores that are closer than this share of the largest are as good as equal to an engine that rounds so.
RESOLUTION = {"fp32": 2.0**-18, "fp16": 2.0**-7}
LEAST = 32  # tokens that a program is judged by
FEW = 0.01  # of all choices: of a sound router no more are close calls in fp32


@dataclass(frozen=True)
class Choices:
    """The experts of a part's layers, each field [layers, n, classes]."""

    chosen: Tensor  # 1 for those that a token takes
    scores: Tensor  # by which they were chosen


def chosen_by(program: Path, function: str, layers: int, rerun: Callable[[], object]) -> Choices:
    """What a program chooses.

    Args:
        program: the bundle.
        function: the one that takes the passes; "" for a program's only one.
        layers: how many have experts.
        rerun: feeds every token once, in order.
    """
    rounds = _rounds(program, function)
    each = len(rounds) // layers  # rounds of a layer
    wanted = {name for scores, chosen in rounds for name in (scores, chosen)}
    seen: dict[str, list[Tensor]] = {name: [] for name in wanted}

    def look(name: str, kind: str, value: Tensor) -> None:
        if name in wanted:
            seen[name].append(value.detach().float().flatten(0, 1).flatten(1).T.clone())  # [T, classes]

    with trace(look):
        rerun()
    found = [torch.cat(seen[chosen]) for _, chosen in rounds]  # each [n, classes]
    taken = [torch.stack(found[i : i + each]).sum(dim=0) for i in range(0, len(found), each)]
    return Choices(torch.stack(taken), torch.stack([torch.cat(seen[scores]) for scores, _ in rounds[::each]]))


def _rounds(program: Path, called: str) -> list[tuple[str, str]]:
    """The scores of every round of models/routing.py's selection, and what it chooses, by their names in the program.

    A round subtracts scores from their maximum, multiplies what follows with the experts' order, subtracts that from
    its own maximum, and subtracts what follows from 1: that is the choice.
    """
    path, wanted = located(program, called)
    function, _ = pick_function(load_model(path), wanted)
    made: dict[str, Op] = {}
    found: list[tuple[str, str]] = []
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
            found.append((scores, op.outputs[0].name))
            ordered = False
    return found


def _maker(op: Op, side: str, made: Mapping[str, Op]) -> Op | None:
    """The operation that an argument comes from."""
    name = op.inputs[side][0]
    return made.get(name) if isinstance(name, str) else None


@dataclass(frozen=True)
class Compared:
    """A program's choices beside transformers', each field [layers, n]."""

    same: Tensor  # whether the sets of experts are equal
    close: Tensor  # whether the scores leave it open
    edge: Tensor  # whether they leave open which experts share a softmax, which the sets do not show

    @property
    def fell(self) -> Tensor:
        """Close calls that fell otherwise."""
        return self.close & ~self.same

    def decided(self, wrong: Tensor) -> int:
        """Return how many tokens come before the first with a call that fell otherwise.

        From there on the two models run on different values, and neither is wrong. All tokens if many calls are close,
        or if none comes before.

        Args:
            wrong: whether what comes out for a token differs, [n]. An expert on the edge fell otherwise only then.

        Raises:
            GateError: if some come before, but too few to judge a program by.
        """
        tokens = torch.nonzero(self.fell.any(dim=0) | (self.edge.any(dim=0) & wrong))
        few = float(self.close.float().mean()) <= FEW
        count = int(tokens[0]) or len(wrong) if len(tokens) and few else len(wrong)
        if count < min(LEAST, len(wrong)):
            raise GateError(
                f"a close call of experts fell otherwise at token {count}: of {len(wrong)} tokens only those before it "
                f"can be compared, and fewer than {LEAST} say too little; name another text in `parity.text`"
            )
        return count

    def before(self, count: int) -> Compared:
        """The choices of the first tokens, so many."""
        return Compared(self.same[:, :count], self.close[:, :count], self.edge[:, :count])


def compared(found: Choices, indices: list[Tensor], precision: str, jitter: float = 0.0) -> Compared:
    """A program's choices beside transformers'.

    Args:
        found: what the program chose.
        indices: of each layer, as gates/routed.py gives them.
        precision: what the program computed in.
        jitter: SparseMixer's eps; 0 for another router.
    """
    count, chosen = found.chosen.shape[2], indices[0].shape[1]
    truth = torch.stack([_sets(index, count) for index in indices])
    ordered = found.scores.sort(dim=2, descending=True).values
    size = found.scores.abs().amax(dim=2)
    close = torch.zeros_like(size, dtype=torch.bool)
    if chosen < count:  # else there is nothing to choose; NaN is no close call
        close = (ordered[..., chosen - 1] - ordered[..., chosen]) <= RESOLUTION[precision] * size
    edge = _on_edge(found.scores, jitter, RESOLUTION[precision]) if jitter else torch.zeros_like(close)
    return Compared((truth == found.chosen).all(dim=2) & ~found.scores.isnan().any(dim=2), close, edge)


def _on_edge(scores: Tensor, jitter: float, resolution: float) -> Tensor:
    """Whether a token's expert is as far from the best as SparseMixer still lets it share a softmax: [layers, n].

    Source: transformers, models/phimoe/modeling_phimoe.py. It takes two experts in turn, the second from those left.
    """
    found = torch.zeros(scores.shape[:2], dtype=torch.bool)
    left, size = scores, scores.abs().amax(dim=2, keepdim=True)
    for _ in range(2):
        best = left.amax(dim=2, keepdim=True)
        beyond = (best - left) - 2 * jitter * torch.maximum(left.abs(), best)
        found |= (beyond.abs() <= resolution * size).any(dim=2)
        left = left.masked_fill(left == best, -torch.inf)
    return found


def agreement(name: str, found: Compared) -> Measurement:
    """The share of tokens and layers whose set of experts is transformers', where the scores decide it."""
    same, close = found.same, found.close
    apart = close | _after(found.fell)
    counted = same[~apart] if bool((~apart).any()) else same
    detail = f"{int(close.sum())} of {close.numel()} choices are close calls"
    if later := int((apart & ~close).sum()):
        detail += f", {later} come after one that fell otherwise"
    return Measurement(name, float(counted.float().mean()), detail)


def _after(fell: Tensor) -> Tensor:
    """The choices [layers, n] of a token in the layers after one in which a close call fell otherwise.

    There the token is another one, and may well take other experts.
    """
    return (fell.int().cumsum(dim=0) - fell.int()) > 0


def _sets(index: Tensor, count: int) -> Tensor:
    """Indices [n, chosen] as a mask [n, classes]; a token without experts takes the last class."""
    mask = torch.zeros(len(index), count)
    return mask.scatter(1, torch.where(index < 0, count - 1, index), 1.0)
