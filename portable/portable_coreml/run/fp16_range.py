"""The fp16 range audit: how close each operation's results come to overflowing fp16 on real inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from portable_coreml.program import Function

_FP16_MAX = torch.finfo(torch.float16).max
_MOVES = frozenset(
    {"concat", "expand_dims", "squeeze", "reshape", "transpose", "tile", "slice_by_index", "cast", "stack"}
)


@dataclass(frozen=True)
class RangeRow:
    """One operation.

    The largest finite magnitude seen, 65504 divided by it, how often it overflowed or was NaN, and the number of
    the prediction in which it first did (from 0), or None.
    """

    output: str
    kind: str
    largest: float
    headroom: float
    overflows: int = 0
    nans: int = 0
    first: int | None = None


class RangeAudit:
    """An observer for `trace()` that keeps the range of every floating-point result over any number of predictions.

    Run it in fp16 mode, so that an overflow is one that the device would have, too. `masks` names inputs of `function`
    that are added to hide values. The hidden entries are the host's constants, not activations, and don't count.
    `begin` then has to get the values of the masks before every prediction.
    """

    def __init__(self, function: Function | None = None, masks: Collection[str] = ()) -> None:
        self._seen: dict[str, RangeRow] = {}
        self._copies, self._added = ({}, {}) if function is None else _uses(function, masks)
        self._hidden: dict[str, Tensor] = {}
        self._prediction = -1

    def begin(self, masks: Mapping[str, Tensor]) -> None:
        """Begin a prediction with these additive masks, which are 0 where a value may be seen."""
        self._prediction += 1
        self._hidden = {name: value != 0 for name, value in masks.items()}

    def __call__(self, name: str, kind: str, value: Tensor) -> None:
        if not value.is_floating_point() or not value.numel():
            return
        if name in self._copies:
            self._hidden[name] = value != 0
            return
        hidden = self._hidden.get(self._added.get(name, ""))
        row = _row(name, kind, value if hidden is None else torch.where(hidden, 0.0, value))
        row = replace(row, first=max(self._prediction, 0) if row.overflows or row.nans else None)
        before = self._seen.get(name)
        self._seen[name] = row if before is None else _worse(before, row)

    def rows(self) -> tuple[RangeRow, ...]:
        """Return every operation in the order in which they first ran."""
        return tuple(self._seen.values())


def _uses(function: Function, masks: Collection[str]) -> tuple[Collection[str], Mapping[str, str]]:
    """Return (values that are masks or rearranged copies of masks, output of an addition -> the mask that it adds)."""
    copies, added = set(masks), {}
    for op in function.block.walk():
        names = [b for bindings in op.inputs.values() for b in bindings if isinstance(b, str)]
        taken = [name for name in names if name in copies]
        data = [b for key in ("x", "values") for b in op.inputs.get(key, ())]
        if op.kind in _MOVES and data and all(b in copies for b in data):
            copies.update(out.name for out in op.outputs)
        elif op.kind == "add" and taken:
            added[op.outputs[0].name] = taken[0]
    return copies, added


def _row(name: str, kind: str, value: Tensor) -> RangeRow:
    finite = value[torch.isfinite(value)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return _with_headroom(RangeRow(name, kind, largest, 0.0, int(value.isinf().sum()), int(value.isnan().sum())))


def _worse(one: RangeRow, two: RangeRow) -> RangeRow:
    merged = replace(
        one,
        largest=max(one.largest, two.largest),
        overflows=one.overflows + two.overflows,
        nans=one.nans + two.nans,
        first=two.first if one.first is None else one.first,
    )
    return _with_headroom(merged)


def _with_headroom(row: RangeRow) -> RangeRow:
    return replace(row, headroom=_FP16_MAX / row.largest if row.largest else float("inf"))
