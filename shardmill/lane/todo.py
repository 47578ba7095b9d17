"""What is measured of a kit, in which order and in which process, and how long the rest may take.

A program is compiled and loaded for the first time in one process. A second one loads it again, which is the warm load,
and measures the rest. At last one process holds all programs of a variant and runs whole passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from shardmill.lane.kit import Kit, Unit
from shardmill.lane.results import Record

COMPILE, FIRST, WARM, WHOLE = "compile", "load.first", "load.warm", "load.whole"


@dataclass(frozen=True)
class Measurement:
    """One line to be.

    Attributes:
        key: VARIANT/UNIT/NAME, or VARIANT/NAME for what is measured of all programs together.
        needs: keys without which it makes no sense.
        weights: bytes of weights that are at stake.
    """

    key: str
    needs: tuple[str, ...]
    weights: int

    @property
    def kind(self) -> str:
        """What is measured, whatever the width and the program."""
        return self.key.rsplit("/", 1)[1].partition(".T=")[0]


@dataclass(frozen=True)
class Group:
    """What one process measures, in order."""

    variant: str
    unit: str  # "" for all of a variant together
    measurements: tuple[Measurement, ...]


def groups(kit: Kit) -> Iterator[Group]:
    """All measurements of a kit."""
    for name in kit.variants:
        for group in _of_variant(kit, name):
            if group.measurements:
                yield group


def _of_variant(kit: Kit, name: str) -> Iterator[Group]:
    units, total = kit.units(name), 0
    for unit in units.values():
        stem, weights, widths = _stem(unit), int(unit.program["weights"]), unit.program["widths"]
        total += weights
        if unit.variant != name:
            continue
        compiled, first, warm = (f"{stem}/{kind}" for kind in (COMPILE, FIRST, WARM))
        yield Group(
            name,
            unit.name,
            (Measurement(compiled, (), weights), Measurement(first, (compiled,), weights)),
        )
        rest = [Measurement(warm, (first,), weights)]
        for kind, need in (("parity", warm), ("speed", warm), ("residency", compiled)):
            rest += [Measurement(f"{stem}/{kind}.T={width}", (need,), weights) for width in widths]
        yield Group(name, unit.name, tuple(rest))
    whole = f"{name}/{WHOLE}"
    together = [Measurement(whole, tuple(f"{_stem(unit)}/{FIRST}" for unit in units.values()), total)]
    for width in _widths(kit.variants[name]):
        together += [Measurement(f"{name}/{kind}.T={width}", (whole,), total) for kind in ("pass", "energy")]
    yield Group(name, "", tuple(together))


def _stem(unit: Unit) -> str:
    """How the keys of what is measured of a program begin."""
    return f"{unit.variant}/{unit.name}"


def _widths(variant: Mapping[str, Any]) -> Sequence[int]:
    found: Sequence[int] = variant["described"]["widths"]
    return found


def seconds_left(todo: Sequence[Measurement], done: Mapping[str, Record], known: Sequence[Measurement]) -> float:
    """An estimate from what was measured so far: of the same kind, by bytes of weights; else the mean of all."""
    taken = [(m, done[m.key]["timing"].get("seconds", 0.0)) for m in known if m.key in done]
    if not taken:
        return 0.0
    overall = float(mean(seconds for _, seconds in taken))
    by_kind: dict[str, list[tuple[int, float]]] = {}
    for measurement, seconds in taken:
        by_kind.setdefault(measurement.kind, []).append((measurement.weights, seconds))

    def expected(measurement: Measurement) -> float:
        alike = by_kind.get(measurement.kind)
        if not alike:
            return overall
        weights = sum(weight for weight, _ in alike)
        share = measurement.weights / weights if weights else 1 / len(alike)
        return float(sum(seconds for _, seconds in alike)) * share

    return sum(expected(measurement) for measurement in todo)
