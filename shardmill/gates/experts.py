"""The experts that a program chooses, token by token, compared with transformers' choices.

A program has no output for its choices, so the passes are run again under observation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from portable_coreml import trace
from portable_coreml.files.bundle import load_model
from portable_coreml.files.model import pick_function
from portable_coreml.program import Op
from torch import Tensor, nn

from shardmill.errors import GateError
from shardmill.gates.measurement import Measurement
from shardmill.runtime.functions import located

LAYER = re.compile(r"layers\.(\d+)\..*\bexperts$")


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a layer's experts."""

    hidden: Tensor  # [n, d]
    index: Tensor  # [n, chosen]; the index after the last expert stands for no expert
    weights: Tensor  # [n, chosen]

    def share(self, start: int, end: int) -> Tensor:
        """Return the weights of experts [start, end), [n, end - start]: 0 if a token is not routed to the expert."""
        dense = torch.zeros(len(self.index), max(end, int(self.index.max()) + 1))
        return dense.scatter_add(1, self.index, self.weights.float())[:, start:end]


Choice = Callable[[Call], tuple[Tensor, Tensor]]  # the experts' arguments -> other indices and weights


def none_taken(call: Call) -> tuple[Tensor, Tensor]:
    """Return the same experts with weights of 0, so that they contribute nothing."""
    return call.index, call.weights * 0


def taken_in_turn(start: int, end: int) -> Choice:
    """Return a choice that uses experts [start, end) only, each in turn, with different weights."""

    def choice(call: Call) -> tuple[Tensor, Tensor]:
        n, taken = len(call.index), min(call.index.shape[1], end - start)
        places = torch.arange(n)[:, None] * taken + torch.arange(taken)
        weights = (1 + torch.arange(n)[:, None] % 3) / 4 * 2.0 ** -torch.arange(taken)  # each exact in fp16
        return start + places % (end - start), weights

    return choice


@contextmanager
def choosing(model: nn.Module, layer: int, choice: Choice) -> Iterator[list[Call]]:
    """Replace the router's choice in a layer by `choice`; yield a list that collects the router's own calls."""
    calls: list[Call] = []
    (experts,) = (module for number, module in _experts(model) if number == layer)
    forward = experts.forward

    def chosen(*args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        index, weights = _choice(args, kwargs)
        calls.append(Call(hidden.flatten(0, -2), index, weights))
        others = dict(zip((id(index), id(weights)), choice(calls[-1]), strict=True))
        return forward(*(others.get(id(v), v) for v in args), **{k: others.get(id(v), v) for k, v in kwargs.items()})

    experts.forward = chosen
    try:
        yield calls
    finally:
        del experts.forward  # restores the class's own forward


def _experts(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the number and the experts module of each layer with experts."""
    for name, module in model.named_modules():
        if (match := LAYER.search(name)) and not isinstance(module, nn.ModuleList):
            yield int(match[1]), module


def _choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the indices and the weights among the experts' arguments."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    index = next(value for value in tensors if not value.is_floating_point())
    return index, next(value for value in tensors if value.is_floating_point() and value.shape == index.shape)


@contextmanager
def observed(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Collect the experts that transformers' model is routed to, indices [n, chosen] by layer; -1 for no expert."""
    found: dict[int, Tensor] = {}

    def looker(layer: int) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index, weights = _choice(args, kwargs)
            found[layer] = torch.where(weights == 0, -1, index).clone()

        return look

    hooks = [module.register_forward_pre_hook(looker(i), with_kwargs=True) for i, module in _experts(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def by_layer(found: Mapping[int, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the result of `observed` as one tensor "experts" [layers, n, chosen], or {} if no layer has experts.

    Layers without experts get the index -1.
    """
    if not found:
        return {}
    none = torch.full_like(next(iter(found.values())), -1)
    return {"experts": torch.stack([found.get(i, none) for i in range(layers)])}


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
    found = [torch.cat(seen[chosen]) for _, chosen in rounds]  # each [n, classes]
    taken = [torch.stack(found[i : i + each]).sum(dim=0) for i in range(0, len(found), each)]
    return Choices(torch.stack(taken), torch.stack([torch.cat(seen[scores]) for scores, _ in rounds[::each]]))


def _rounds(program: Path, called: str) -> list[tuple[str, str]]:
    """Return, for each round of models/routing.py's selection, the program's names for its scores and its choice.

    A round subtracts scores from their maximum and multiplies the result with the experts' order. It subtracts the
    product from its maximum, and subtracts a last result from 1: this is the choice.
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
    """Return the operation that produces an argument."""
    name = op.inputs[side][0]
    return made.get(name) if isinstance(name, str) else None


@dataclass(frozen=True)
class Compared:
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
        frequent, or if the first token already has such a call.

        Args:
            wrong: True for each token whose output differs, [n]. A token with an expert on the edge counts as decided
                differently only if its output differs.

        Raises:
            GateError: if there is such a call, and too few tokens before it to judge a program.
        """
        tokens = torch.nonzero(self.fell.any(dim=0) | (self.edge.any(dim=0) & wrong))
        few = float(self.close.float().mean()) <= FEW
        count = int(tokens[0]) or len(wrong) if len(tokens) and few else len(wrong)
        if count < min(LEAST, len(wrong)):
            raise GateError(
                f"a close call between experts was decided differently at token {count} of {len(wrong)}: only tokens "
                f"before it can be compared, and at least {LEAST} are needed; name another text in `parity.text`"
            )
        return count

    def before(self, count: int) -> Compared:
        """Return the choices of the first `count` tokens."""
        return Compared(self.same[:, :count], self.close[:, :count], self.edge[:, :count])


def compared(found: Choices, indices: list[Tensor], precision: str, jitter: float = 0.0) -> Compared:
    """Compare a program's choices with transformers' choices.

    Args:
        found: the program's choices.
        indices: the experts of each layer, as returned by gates/routed.py.
        precision: the precision in which the program computed.
        jitter: SparseMixer's eps; 0 for any other router.
    """
    count, chosen = found.chosen.shape[2], indices[0].shape[1]
    truth = torch.stack([_sets(index, count) for index in indices])
    ordered = found.scores.sort(dim=2, descending=True).values
    size = found.scores.abs().amax(dim=2)
    close = torch.zeros_like(size, dtype=torch.bool)
    if chosen < count:  # otherwise there is nothing to choose; NaN is no close call
        close = (ordered[..., chosen - 1] - ordered[..., chosen]) <= RESOLUTION[precision] * size
    edge = _on_edge(found.scores, jitter, RESOLUTION[precision]) if jitter else torch.zeros_like(close)
    return Compared((truth == found.chosen).all(dim=2) & ~found.scores.isnan().any(dim=2), close, edge)


def _on_edge(scores: Tensor, jitter: float, resolution: float) -> Tensor:
    """Return whether an expert is at SparseMixer's limit for sharing a softmax: [layers, n].

    Source: transformers, models/phimoe/modeling_phimoe.py. It selects two experts in turn, the second among the rest.
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
    """Measure the share of tokens and layers with the same set of experts as transformers, if the scores decide it."""
    same, close = found.same, found.close
    apart = close | _after(found.fell)
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
