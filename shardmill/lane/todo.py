"""The measurements of a kit, their order and processes, and an estimate of the time left.

A program is compiled and loaded for the first time in one process. A second one loads it again, which is the warm load,
and measures passes; a third one reads compute plans. Others load it in another way: without its build's hint, on the
CPU alone, from the portable compiler's bundle. Finally one process loads all programs of a variant and runs whole
passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from shardmill.lane.kit import CPU, PORTABLE, UNHINTED, Kit, LaneError, Unit
from shardmill.lane.results import Record, Results

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
        return self.key.rsplit("/", 1)[1].partition(".T=")[0]


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
    """Return all requested measurements of a kit.

    Args:
        kit: the kit to measure.
        soaks: True to include passes with pauses.
        only: prefixes of the requested kinds, whose prerequisites are added; empty for all kinds.

    Raises:
        LaneError: a prefix in `only` matches no measurement.
    """
    every = [group for name in kit.variants for group in _of_variant(kit, name, soaks)]
    known = {m.key: m for group in every for m in group.measurements}
    kinds = sorted({m.kind for m in known.values()})
    for name in only:
        if not any(kind.startswith(name) for kind in kinds):
            raise LaneError(f"--only {name}: no such measurement; choose from {', '.join(kinds)}")
    wanted = [key for key, m in known.items() if not only or m.kind.startswith(tuple(only))]
    for key in wanted:  # the list grows during iteration
        wanted += [need for need in known[key].needs if need not in wanted]
    kept = (MeasurementGroup(g.variant, g.unit, tuple(m for m in g.measurements if m.key in wanted)) for g in every)
    return [group for group in kept if group.measurements]


def _of_variant(kit: Kit, name: str, soaks: bool) -> Iterator[MeasurementGroup]:
    units = kit.units(name)
    total = sum(int(unit.program["weights"]) for unit in units.values())
    for unit in units.values():
        if unit.variant == name:
            yield from (MeasurementGroup(name, unit.name, tuple(each)) for each in _of_unit(unit))
    whole = f"{name}/{WHOLE}"
    needs = tuple(f"{_stem(unit)}/{FIRST}" for unit in units.values())
    together, widths = [PlannedMeasurement(whole, needs, total)], _widths(kit.variants[name])
    for width in widths:
        together += [PlannedMeasurement(f"{name}/{kind}.T={width}", (whole,), total) for kind in ("pass", "energy")]
    decodes = kit.variants[name]["described"]["kind"] == "decoder"
    together += [
        PlannedMeasurement(f"{name}/widths.T={width}", (whole,), total) for width in widths if decodes and width > 1
    ]
    yield MeasurementGroup(name, "", tuple(together))
    for way in ("kept", "fresh") if soaks else ():
        yield MeasurementGroup(name, "", (PlannedMeasurement(f"{name}/soak.{way}", (whole,), total),))


def _of_unit(unit: Unit) -> Iterator[list[PlannedMeasurement]]:
    """Yield the measurements of a program, process by process."""
    stem, widths, weights = _stem(unit), unit.program["widths"], int(unit.program["weights"])

    def each(kind: str, need: str) -> list[PlannedMeasurement]:
        return [PlannedMeasurement(f"{stem}/{kind}.T={width}", (f"{stem}/{need}",), weights) for width in widths]

    def one(kind: str, *needs: str) -> PlannedMeasurement:
        return PlannedMeasurement(f"{stem}/{kind}", tuple(f"{stem}/{need}" for need in needs), weights)

    changes = len(widths) > 1
    yield [one(COMPILE), one(FIRST, COMPILE)]
    yield [one(WARM, FIRST), *each("parity", WARM), *each("speed", WARM), *([one("switch", WARM)] if changes else [])]
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


def _widths(variant: Mapping[str, Any]) -> Sequence[int]:
    found: Sequence[int] = variant["described"]["widths"]
    return found


def seconds_left(
    todo: Sequence[PlannedMeasurement], done: Mapping[str, Record], known: Sequence[PlannedMeasurement]
) -> float:
    """Estimate the time left from finished measurements: of the same kind, by bytes of weights; otherwise the mean."""
    taken = [(m, done[m.key]["timing"].get("seconds", 0.0)) for m in known if m.key in done]
    if not taken:
        return 0.0
    overall = float(mean(seconds for _, seconds in taken))
    by_kind: dict[str, list[tuple[int, float]]] = {}
    for measurement, seconds in taken:
        by_kind.setdefault(measurement.kind, []).append((measurement.weights, seconds))

    def expected(measurement: PlannedMeasurement) -> float:
        alike = by_kind.get(measurement.kind)
        if not alike:
            return overall
        weights = sum(weight for weight, _ in alike)
        share = measurement.weights / weights if weights else 1 / len(alike)
        return float(sum(seconds for _, seconds in alike)) * share

    return sum(expected(measurement) for measurement in todo)


WITHOUT_DEVICE = ("const", "read_state")  # rule O15: prefixes of operations without a device in a plan


def planned(bundle: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each operation: function, output, operation, status and preferred device, "" for no device."""
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    plan = MLComputePlan.load_from_path(str(bundle), compute_units=ct.ComputeUnit.CPU_AND_NE)
    for name, function in plan.model_structure.program.functions.items():
        for op in _nested_operations(function.block):
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            device = "" if usage is None else type(usage.preferred_compute_device).__name__
            able = [] if usage is None else [type(d).__name__ for d in usage.supported_compute_devices]
            kind = op.operator_name
            status = measured_status(kind, device, able)
            yield {"function": name, "output": _output_of(op), "operation": kind, "status": status, "device": device}


def measured_status(kind: str, device: str, able: Sequence[str]) -> str:
    """Return the status that follows from a plan's devices.

    Args:
        kind: the operation's type.
        device: the device that the plan prefers; "" if it names none.
        able: the devices that support the operation.
    """
    if "NeuralEngine" in device:
        return "ane"
    if device:
        return "not_chosen" if any("NeuralEngine" in name for name in able) else "ineligible"
    plain = kind.split(".")[-1]  # "ios18.conv" -> "conv"
    return "no_device" if plain.startswith(WITHOUT_DEVICE) else "unknown"


def _output_of(op: Any) -> str:
    """Return the name of a plan's operation, as in the rules: its first output, or the state that it writes."""
    if op.outputs:
        return str(op.outputs[0].name)
    written = op.inputs["input"].bindings if "input" in op.inputs else ()
    return next((str(binding.name) for binding in written if binding.name), "")


def _nested_operations(block: Any) -> Iterator[Any]:
    """Yield all operations of a block and of its nested blocks."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from _nested_operations(inner)


SHOWN = ("load_seconds", "plan_seconds", "ms", "psnr", "width_error_fp16", "margin")  # figures to show, if present


class Progress:
    """Lines on the terminal."""

    def __init__(self, groups: Sequence[MeasurementGroup], results: Results) -> None:
        """Print a line if an earlier run has left results."""
        self._all = [measurement for group in groups for measurement in group.measurements]
        self._results = results
        if results.records:
            print(f"going on: {len(results.records)} measurements are there already", flush=True)

    def begin(self, key: str) -> None:
        """Print that a measurement begins."""
        print(f"{self._place()} {key} ...", flush=True)

    def done(self, record: Record) -> None:
        """Print the result of a measurement."""
        words = [record["status"], f"{record['timing']['seconds']:.1f} s" if "seconds" in record["timing"] else ""]
        figures = {**record["value"], **record["timing"]}
        words += [f"{name} {figures[name]:.4g}" for name in SHOWN if figures.get(name) is not None]
        words += [record["detail"], self._left()]
        print(f"{self._place()} {record['key']}: {', '.join(word for word in words if word)}", flush=True)

    def _place(self) -> str:
        finished = sum(m.key in self._results.records for m in self._all)
        return f"[{finished}/{len(self._all)}]"

    def _left(self) -> str:
        todo = [m for m in self._all if m.key not in self._results.records]
        seconds = seconds_left(todo, self._results.records, self._all)
        if not seconds:
            return ""
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
