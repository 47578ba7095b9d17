"""Helpers for families with experts: where the experts lie in a checkpoint, and how many share a projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from portable_coreml.judge.rules.shapes import MAX_OUTPUT_CHANNELS

from shardmill.errors import CheckpointError
from shardmill.models.architecture import Experts, Sources, TensorSource

# If a layer has at most MOST_ALONE experts, each has separate projections: they keep the checkpoint's rows and INT8
# scales one to one, and 36 convolutions a layer were seen to run on the Neural Engine (ane-book, ZAYA, Exp 34, M4 Max).
# If it has more, up to MOST_TOGETHER experts share a projection.
MOST_ALONE = 32
MOST_TOGETHER = 16

At = Callable[[str, int], TensorSource]  # "gate_proj", "up_proj" or "down_proj" and the expert -> its matrix


def grouped(experts: Experts) -> Experts:
    """Return the experts; above MOST_ALONE, as many share a projection as its output channels allow."""
    fitting = [
        n for n in range(1, MOST_TOGETHER + 1) if not experts.count % n and n * experts.ffn <= MAX_OUTPUT_CHANNELS
    ]
    return replace(experts, group=1 if experts.count <= MOST_ALONE else max(fitting, default=1))


def checked_experts(experts: Experts) -> Experts:
    """Return `grouped` experts. Raises CheckpointError if a token takes no experts, or more than the layer has."""
    if not 1 <= experts.chosen <= experts.classes:
        raise CheckpointError(f"num_experts_per_tok {experts.chosen}: there are {experts.classes} experts")
    return grouped(experts)


def separate(e: Experts, hidden: int, names: Mapping[str, str]) -> dict[str, Sources]:
    """Return sources of experts whose matrices each lie in a separate tensor.

    Args:
        e: the experts.
        hidden: the model's width.
        names: the tensors' names for gate_proj, up_proj and down_proj; {} stands for the expert's number.
    """
    wide, narrow = (e.ffn, hidden), (hidden, e.ffn)
    return _sources(
        e, lambda role, i: TensorSource(names[role].format(i), shape=narrow if role == "down_proj" else wide)
    )


def stacked(e: Experts, hidden: int, gate_up: str, down: str) -> dict[str, Sources]:
    """Return sources of experts in two tensors: [experts, 2 * ffn, hidden], gate first, and [experts, hidden, ffn]."""

    def at(role: str, i: int) -> TensorSource:
        if role == "down_proj":
            return TensorSource(down, index=i, shape=(e.count, hidden, e.ffn))
        first = e.ffn * (role == "up_proj")
        return TensorSource(gate_up, index=i, rows=(first, first + e.ffn, 1), shape=(e.count, 2 * e.ffn, hidden))

    return _sources(e, at)


def transposed(e: Experts, hidden: int, path: str, *, interleaved: bool) -> dict[str, Sources]:
    """Return sources of experts whose two tensors are stored transposed, with biases.

    Args:
        e: the experts.
        hidden: the model's width.
        path: the prefix of the names of gate_up_proj [experts, hidden, 2 * ffn], down_proj [experts, ffn, hidden] and
            their biases.
        interleaved: whether gate and up alternate by column; otherwise they are the first and the second half.
    """

    def rows(role: str) -> tuple[int, int, int]:
        second = role == "up_proj"
        return (int(second), 2 * e.ffn, 2) if interleaved else (e.ffn * second, e.ffn * (1 + second), 1)

    def at(role: str, i: int) -> TensorSource:
        if role == "down_proj":
            return TensorSource(f"{path}down_proj", index=i, transposed=True, shape=(e.count, e.ffn, hidden))
        shape = (e.count, hidden, 2 * e.ffn)
        return TensorSource(f"{path}gate_up_proj", index=i, transposed=True, rows=rows(role), shape=shape)

    sources = _sources(e, at)
    for j, members in enumerate(_members(e)):
        for role in ("gate_proj", "up_proj"):
            bias = TensorSource(f"{path}gate_up_proj_bias", rows=rows(role), shape=(e.count, 2 * e.ffn))
            sources[f"mlp.experts.{j}.{role}.bias"] = tuple(replace(bias, index=i) for i in members)
    sources["mlp.down_bias"] = TensorSource(f"{path}down_proj_bias", transposed=True, shape=(e.count, hidden))
    return sources


def _sources(e: Experts, at: At) -> dict[str, Sources]:
    """Return the sources of all groups' matrices by their role."""
    sources: dict[str, Sources] = {}
    for j, members in enumerate(_members(e)):
        path = f"mlp.experts.{j}."
        for role in ("gate_proj", "up_proj"):
            sources[f"{path}{role}.weight"] = tuple(at(role, i) for i in members)
        down = tuple(at("down_proj", i) for i in members)
        if e.group == 1:
            sources[f"{path}down_proj.weight"] = down
            continue
        # One INT8 scale a row serves the whole group: each expert is divided by its magnitude, and the magnitude is a
        # constant.
        sources[f"{path}down_proj.weight"] = tuple(replace(one, magnitude="divide") for one in down)
        sources[f"{path}scale"] = tuple(replace(one, magnitude="only", repeat=e.ffn) for one in down)
    return sources


def _members(e: Experts) -> list[range]:
    """Return the experts of each group."""
    return [range(first, first + e.group) for first in range(0, e.count, e.group)]
