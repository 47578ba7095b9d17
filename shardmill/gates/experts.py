"""Which experts a program chooses, token by token, against those that transformers chooses.

A program's choice is no output of it: the passes are fed once more, observed. Every round of models/routing.py's
selection leaves a value that begins with CHOSEN, and starts from a maximum over the scores.
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
from portable_coreml.files.load import load_model
from portable_coreml.files.model import pick_function
from portable_coreml.program import Op
from torch import Tensor, nn

from shardmill.gates.thresholds import Measurement
from shardmill.models.architecture import Experts

CHOSEN, BEST = "chosen_expert", "best_score"  # what models/routing.py calls them
LAYER = re.compile(r"layers\.(\d+)\..*\bexperts$")
# Scores that are closer than this share of the largest are as good as equal to an engine that rounds so.
RESOLUTION = {"fp32": 2.0**-18, "fp16": 2.0**-7}


@dataclass(frozen=True)
class Choices:
    """The experts of a part's layers, each field [layers, n, classes]."""

    chosen: Tensor  # 1 for those that a token takes
    scores: Tensor  # by which they were chosen


def chosen_by(program: Path, experts: Experts, layers: int, rerun: Callable[[], object]) -> Choices:
    """What a program chooses. Args: rerun feeds every token once, in order; layers how many have experts."""
    first, rounds = _first_scores(program)
    seen: dict[str, list[Tensor]] = {CHOSEN: [], BEST: []}

    def look(name: str, kind: str, value: Tensor) -> None:
        for prefix, found in ((CHOSEN, kind == "sub" and name.startswith(CHOSEN)), (BEST, name in first)):
            if found:
                seen[prefix].append(value.detach().float().reshape(experts.classes, -1).T.clone())  # [T, classes]

    with trace(look):
        rerun()
    chosen = torch.cat([torch.stack(group) for group in _groups(seen[CHOSEN], rounds)], dim=1)
    scores = torch.cat([torch.stack(group) for group in _groups(seen[BEST], layers)], dim=1)  # [layers, n, classes]
    return Choices(chosen.reshape(layers, rounds // layers, *chosen.shape[1:]).sum(dim=1), scores)


def _groups(values: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """What each pass left."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _first_scores(program: Path) -> tuple[frozenset[str], int]:
    """The values that the first maximum of each choice is taken of, and how many rounds there are in all."""
    function, _ = pick_function(load_model(program), "")
    made = {op.outputs[0].name: op for op in function.block.ops if op.outputs}
    chosen = {name for name, op in made.items() if op.kind == "sub" and name.startswith(CHOSEN)}
    maxima = (op.inputs["x"][0] for name, op in made.items() if op.kind == "reduce_max" and name.startswith(BEST))
    first = (name for name in maxima if isinstance(name, str) and not _follows(made[name], made, chosen))
    return frozenset(first), len(chosen)


def _follows(op: Op, made: Mapping[str, Op], chosen: set[str]) -> bool:
    """Whether scores are those of a later round: they take out what a round before chose, a product of it."""
    reads = [name for bound in op.inputs.values() for name in bound if isinstance(name, str)]
    products = [name for each in reads if each in made for bound in made[each].inputs.values() for name in bound]
    return any(name in chosen for name in (*reads, *products) if isinstance(name, str))


@contextmanager
def observed(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Collects, by layer, [n, chosen] indices of the experts that transformers' model takes; -1 for none."""
    found: dict[int, Tensor] = {}

    def looker(layer: int) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            index = next(value for value in tensors if not value.is_floating_point())
            weights = next(value for value in tensors if value.is_floating_point() and value.shape == index.shape)
            found[layer] = torch.where(weights == 0, -1, index).clone()

        return look

    hooks = [
        module.register_forward_pre_hook(looker(int(match[1])), with_kwargs=True)
        for name, module in model.named_modules()
        if (match := LAYER.search(name)) and not isinstance(module, nn.ModuleList)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def by_layer(found: Mapping[int, Tensor], layers: int) -> dict[str, Tensor]:
    """What `observed` found as one tensor "experts" [layers, n, chosen], -1 in layers without; none without any."""
    if not found:
        return {}
    none = torch.full_like(next(iter(found.values())), -1)
    return {"experts": torch.stack([found.get(i, none) for i in range(layers)])}


def agreement(name: str, found: Choices, indices: list[Tensor], precision: str) -> Measurement:
    """The share of tokens and layers whose set of experts is transformers', where the scores decide it.

    Args:
        name: of the measurement.
        found: what the program chose.
        indices: of each layer, as `observed` gives them.
        precision: what the program computed in.
    """
    count, chosen = found.chosen.shape[2], indices[0].shape[1]
    truth = torch.stack([_sets(index, count) for index in indices])
    ordered = found.scores.sort(dim=2, descending=True).values
    size = found.scores.abs().amax(dim=2)
    clear = (ordered[..., chosen - 1] - ordered[..., chosen]) > RESOLUTION[precision] * size
    same = (truth == found.chosen).all(dim=2)
    share = float(same[clear].float().mean()) if bool(clear.any()) else 1.0
    close = f"{int((~clear).sum())} of {clear.numel()} choices are close calls"
    return Measurement(name, share, close)


def _sets(index: Tensor, count: int) -> Tensor:
    """Indices [n, chosen] as a mask [n, classes]; a token without experts takes the last class."""
    mask = torch.zeros(len(index), count)
    return mask.scatter(1, torch.where(index < 0, count - 1, index), 1.0)
