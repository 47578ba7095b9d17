"""The measurements of a kit, their order and processes, and an estimate of the time left.

A program is compiled and loaded for the first time in one process. A second one loads it again, which is the warm load,
and measures passes; a third one reads compute plans. Others load it in another way: without its build's hint, on the
CPU alone, from the portable compiler's bundle. Finally one process loads all programs of a variant and runs whole
passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kit_runner.kit import ASKED, CPU, PORTABLE, UNHINTED, Kit, KitError, Record, Unit
from kit_runner.questions import key as probe_key

CHECK = "check."  # begins the name of a measurement, which ends with the way in which a program is fed
COMPILE, FIRST, WARM, WHOLE = "compile", "load.first", "load.warm", "load.whole"


@dataclass(frozen=True)
class PlannedMeasurement:
    """One planned line of the results.

    Attributes:
        key: VARIANT/UNIT/NAME, or VARIANT/NAME for a measurement of all programs together.
        needs: keys of the measurements that must succeed first.
        weights: bytes of the weights involved.
    """

    key: str
    needs: tuple[str, ...]
    weights: int

    @property
    def kind(self) -> str:
        """Return the kind of measurement, without width and program."""
        return self.key.rsplit("/", 1)[1].partition(".T=")[0].partition("#")[0]


@dataclass(frozen=True)
class MeasurementGroup:
    """The measurements of one process, in order."""

    variant: str
    unit: str  # "" for all units of a variant together
    measurements: tuple[PlannedMeasurement, ...]


def is_beside(key: str) -> bool:
    """Return whether a measurement loads its program in another way than its build does."""
    return key.rsplit("/", 1)[-1].partition(".T=")[0].partition(".")[2] in (UNHINTED, CPU, PORTABLE, "fresh")


def groups(kit: Kit, soaks: bool = False, only: Sequence[str] = ()) -> list[MeasurementGroup]:
    """Return all requested measurements of a kit: first the probes of its questions.

    Args:
        kit: the kit to measure.
        soaks: True to include passes with pauses.
        only: prefixes of the requested kinds, whose prerequisites are added; empty for all kinds.

    Raises:
        KitError: a prefix in `only` matches no measurement.
    """
    every = [group for question in kit.questions for group in _of_question(question)]
    every += [group for name in kit.variants for group in _of_variant(kit, name, soaks)]
    known = {m.key: m for group in every for m in group.measurements}
    kinds = sorted({m.kind for m in known.values()})
    for name in only:
        if not any(kind.startswith(name) for kind in kinds):
            raise KitError(f"--only {name}: no such measurement; choose from {', '.join(kinds)}")
    wanted = [key for key, m in known.items() if not only or m.kind.startswith(tuple(only))]
    for key in wanted:  # the list grows during iteration
        wanted += [need for need in known[key].needs if need not in wanted]
    chosen = (MeasurementGroup(g.variant, g.unit, tuple(m for m in g.measurements if m.key in wanted)) for g in every)
    return [group for group in chosen if group.measurements]


def _of_question(question: Mapping[str, Any]) -> Iterator[MeasurementGroup]:
    """Yield each probe of a question in a separate process, whose end frees the memory of a large program."""
    for place, asked in enumerate(question["probes"]):
        line = PlannedMeasurement(probe_key(question["name"], place), (), int(asked.get("bytes", 1 << 24)))
        yield MeasurementGroup(ASKED, question["name"], (line,))


def _of_variant(kit: Kit, name: str, soaks: bool) -> Iterator[MeasurementGroup]:
    units = kit.units(name)
    total = sum(int(unit.program["weights"]) for unit in units.values())
    for unit in units.values():
        if unit.variant == name:
            checks = _checks(unit, kit.variants[name].get("checks", {}).get(unit.part["name"], ()))
            yield from (MeasurementGroup(name, unit.name, tuple(each)) for each in _of_unit(unit, checks))
    whole, described = f"{name}/{WHOLE}", kit.variants[name]["described"]

    def after(kind: str) -> PlannedMeasurement:
        return PlannedMeasurement(f"{name}/{kind}", (whole,), total)

    together = [PlannedMeasurement(whole, tuple(f"{_stem(unit)}/{FIRST}" for unit in units.values()), total)]
    together += [after(f"{kind}.T={width}") for width in described["widths"] for kind in ("pass", "energy")]
    if described["kind"] == "decoder":
        together += [after(f"widths.T={width}") for width in described["widths"] if width > 1]
    yield MeasurementGroup(name, "", tuple(together))
    for way in ("kept", "fresh") if soaks else ():
        yield MeasurementGroup(name, "", (after(f"soak.{way}"),))


def _checks(unit: Unit, ways: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the ways in which a program is checked: it must take every pass of a way."""
    widths = {way["way"].replace(" ", "-"): {one["width"] for one in way["passes"]} for way in ways}
    return [name for name, each in widths.items() if not unit.program["fixed"] or each <= {*unit.program["widths"]}]


def _of_unit(unit: Unit, checks: Sequence[str]) -> Iterator[list[PlannedMeasurement]]:
    """Yield the measurements of a program, process by process."""
    stem, widths, weights = _stem(unit), unit.program["widths"], int(unit.program["weights"])

    def each(kind: str, need: str) -> list[PlannedMeasurement]:
        return [PlannedMeasurement(f"{stem}/{kind}.T={width}", (f"{stem}/{need}",), weights) for width in widths]

    def one(kind: str, *needs: str) -> PlannedMeasurement:
        return PlannedMeasurement(f"{stem}/{kind}", tuple(f"{stem}/{need}" for need in needs), weights)

    changes = len(widths) > 1
    yield [one(COMPILE), one(FIRST, COMPILE)]
    right = [*each("parity", WARM), *(one(f"{CHECK}{way}", WARM) for way in checks)]
    yield [one(WARM, FIRST), *right, *each("speed", WARM), *([one("switch", WARM)] if changes else [])]
    yield each("residency", COMPILE)
    if unit.program.get("reshape_frequency"):
        loaded = f"load.{UNHINTED}"
        rest = [one(f"switch.{UNHINTED}", loaded)] if changes else []
        yield [one(loaded, COMPILE), *each(f"speed.{UNHINTED}", loaded), *rest]
    yield [one(f"load.{CPU}", COMPILE), *each(f"speed.{CPU}", f"load.{CPU}")]
    if unit.program.get("bundle"):
        yield [one(f"load.{PORTABLE}")]


def _stem(unit: Unit) -> str:
    """Return the prefix of a program's keys."""
    return f"{unit.variant}/{unit.name}"


def seconds_left(
    todo: Sequence[PlannedMeasurement], done: Mapping[str, Record], known: Sequence[PlannedMeasurement]
) -> float:
    """Estimate the time left from finished measurements of the same kind, by bytes of weights, or from all of them."""
    spent: dict[str, tuple[int, int, float]] = {}  # number of measurements, their bytes of weights, seconds, by kind
    for m in (m for m in known if m.key in done):
        count, weights, seconds = spent.get(m.kind, (0, 0, 0.0))
        spent[m.kind] = (count + 1, weights + m.weights, seconds + done[m.key]["timing"].get("seconds", 0.0))
    if not spent:
        return 0.0
    overall = sum(seconds for _, _, seconds in spent.values()) / sum(count for count, _, _ in spent.values())
    left = 0.0
    for m in todo:
        count, weights, seconds = spent.get(m.kind, (1, 0, overall))
        left += seconds * (m.weights / weights if weights else 1 / count)
    return left
