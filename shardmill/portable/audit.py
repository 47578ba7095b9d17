"""The fp16 range audit: how near each operation of a program comes to the end of fp16 while real inputs pass
through it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .observe import FP16_MAX


@dataclass(frozen=True)
class RangeRow:
    """One operation: the largest finite magnitude seen, 65504 divided by it, and how often it overflowed or was
    NaN.
    """

    output: str
    kind: str
    largest: float
    headroom: float
    overflows: int
    nans: int


class RangeAudit:
    """An observer for `trace()` that keeps the range of every floating-point result over any number of predictions.

    Run it in fp16 mode: then an overflow is one that the device would have, too.
    """

    def __init__(self) -> None:
        self._seen: dict[str, RangeRow] = {}
        self.first_nonfinite: str | None = None

    def __call__(self, name: str, kind: str, value: Tensor) -> None:
        if not value.is_floating_point() or not value.numel():
            return
        finite = value[torch.isfinite(value)]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        overflows, nans = int(torch.isinf(value).sum()), int(torch.isnan(value).sum())
        if (overflows or nans) and self.first_nonfinite is None:
            self.first_nonfinite = name
        before = self._seen.get(name)
        if before is not None:
            largest = max(largest, before.largest)
            overflows, nans = overflows + before.overflows, nans + before.nans
        headroom = FP16_MAX / largest if largest else float("inf")
        self._seen[name] = RangeRow(name, kind, largest, headroom, overflows, nans)

    def rows(self) -> tuple[RangeRow, ...]:
        """Every operation in the order in which they first ran."""
        return tuple(self._seen.values())
