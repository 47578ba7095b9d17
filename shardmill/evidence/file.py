"""One file of evidence: is it whole, which build is it of, and what does it say."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import load_json, read_sealed
from shardmill.lane.results import FORMAT, KIND, STATUSES
from shardmill.lane.todo import is_beside
from shardmill.printable import printable

LONGEST_MESSAGE = 200  # characters of a message
Size = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 53)]
Figure = Annotated[float, Field(strict=True, ge=0, le=1e18, allow_inf_nan=False)]


@checked_dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    chip: str
    os: str
    system: str
    build: str
    memory_bytes: Size
    python: str
    packages: dict[str, str]


@checked_dataclass(frozen=True)
class Described:
    """A build's form, as far as anything is computed with it."""

    kind: Literal["decoder", "encoder"]
    widths: Annotated[list[Count], Field(min_length=1)]
    shapes: str
    programs: Count
    weights_bytes: Size
    state_bytes: Size
    parameters: Size
    precision: str
    context: Size | None = None


@checked_dataclass(frozen=True)
class EvidenceRow:
    """An operation of a compute plan."""

    output: str
    operation: str
    status: str


@checked_dataclass(frozen=True)
class EvidenceValue:
    """What a measurement found, as far as it is read."""

    evidence: Literal["measured", "predicted"] | None = None
    counts: dict[str, Size] | None = None
    rows: list[EvidenceRow] | None = None
    tokens: Size | None = None
    agree: Size | None = None
    programs: Size | None = None


@checked_dataclass(frozen=True)
class Line:
    """A measurement."""

    status: Annotated[str, Field(pattern=f"^({'|'.join(STATUSES)})$")]
    value: EvidenceValue
    timing: dict[str, Figure | None]
    detail: str


@checked_dataclass(frozen=True)
class Variant:
    """A build in a context."""

    model: str
    source: dict[str, Any]
    described: Described
    artifacts: dict[str, dict[str, str]]
    measurements: dict[str, Line]


@checked_dataclass(frozen=True)
class DeviceEngine:
    """What ran the programs."""

    name: str


@checked_dataclass(frozen=True)
class Result:
    """The whole file."""

    format: Literal[FORMAT]  # type: ignore[valid-type]
    kind: Literal[KIND]  # type: ignore[valid-type]
    kit: str
    machine: Machine
    engine: DeviceEngine
    variants: dict[str, Variant]


def _evidence_faults(content: Any) -> Iterator[str]:
    """Yield what keeps JSON from being a result, the first of it."""
    try:
        found = TypeAdapter(Result).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = "not there" if first["type"] in ("missing", "missing_argument") else first["msg"]
        yield printable(f"{where}: {message[0].lower()}{message[1:]}")[:LONGEST_MESSAGE]
        return
    for name, variant in found.variants.items():
        for key, line in variant.measurements.items():
            plan = key.rpartition("/")[2].startswith("residency.") and line.status == "ok"
            if plan and (line.value.rows is None or line.value.evidence is None):
                yield printable(f"variants.{name}.measurements.{key}.value: has no rows, or not whose they are")[
                    :LONGEST_MESSAGE
                ]


Json = Mapping[str, Any]
COREML = "coreml"
INFREQUENT = "infrequent"  # what Core ML is told of changing shapes where model.json does not say
APART = "each"  # what a kit says of bundles where each function has one of its own
LONGEST = 100  # characters of a file's name; what else there is to tell systems apart is hashed
TROUBLE = ("wrong", "refused", "crashed", "timeout")


@dataclass(frozen=True)
class Evidence:
    """What one run of the lane says of one build.

    Attributes:
        path: the file.
        content: of the whole file.
        variant: the part of it that is about the build.
        shorter: the same of each shorter context that the build's programs have functions for, the longest first.
    """

    path: Path
    content: Json
    variant: Json
    shorter: tuple[Evidence, ...] = ()

    @property
    def is_measured(self) -> bool:
        """Return whether Apple's Core ML ran; of another engine's figures none counts for a device."""
        return bool(self.content["engine"]["name"] == COREML)

    @property
    def system(self) -> str:
        """Return chip, system, and the engine where it is another than Core ML, for a person."""
        return _system_of(self.content)

    @property
    def lines(self) -> Json:
        """Return the measurements by key: UNIT/NAME of a program, NAME of all together."""
        found: Json = self.variant["measurements"]
        return found

    @property
    def context(self) -> int:
        """Return slots of the context that was measured; 0 for an encoder."""
        return _context(self.variant)

    @property
    def widths(self) -> list[int]:
        """Return those that were to be measured."""
        return sorted(self.variant["described"]["widths"])

    @cached_property
    def troubles(self) -> list[tuple[str, str, str]]:
        """Return key, status and detail of each measurement that went wrong; which operation it was goes with it."""
        found = [(key, line["status"], line["detail"]) for key, line in self.lines.items() if _is_trouble(key, line)]
        blamed = [(key, "bisected", line["detail"]) for key, line in self.lines.items() if key.endswith("/bisect")]
        further = [
            (f"{key} in {one.context} slots", status, detail)
            for one in self.shorter
            for key, status, detail in one.troubles
        ]
        return [*sorted([*found, *blamed]), *further]

    def timing(self, key: str, name: str) -> float | None:
        """Return a figure of a measurement, if it was taken."""
        value = self.lines.get(key, {}).get("timing", {}).get(name)
        return float(value) if isinstance(value, int | float) else None

    def total(self, ending: str, name: str) -> float | None:
        """Return the sum of a figure over all programs; None where one lacks it."""
        keys = [key for key in self.lines if key.endswith(f"/{ending}")]
        found = [self.timing(key, name) for key in keys]
        known = [value for value in found if value is not None]
        return sum(known) if known and len(known) == len(found) else None

    def residency(self, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part's compute plans as residency/PART.json has them."""
        found = []
        for key, line in sorted(self.lines.items()):
            unit, _, name = key.rpartition("/")
            if unit.partition(".")[0] == part and name.startswith("residency.") and line["status"] == "ok":
                shape, evidence = name.removeprefix("residency."), line["value"]["evidence"]
                found += [{**row, "shape": shape, "evidence": evidence, "rules": ()} for row in line["value"]["rows"]]
        return found


def is_result(path: Path) -> bool:
    """Return whether a file calls itself a result of the lane; of one that can't be read, whoever reads it says why."""
    try:
        content = load_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


def read_result(path: Path) -> dict[str, Any]:
    """Return a result of the lane, checked. Raises ShardmillError where it is none, or not as it was written."""
    try:
        content = read_sealed(path)
    except UnreadableError as error:
        why = "" if path.is_file() else f" ({error.__cause__})"
        raise ShardmillError(
            f"{path}: no result.json of measure.py, or not as that wrote it{why}; take the one that it wrote, again"
        ) from error
    for problem in _evidence_faults(content):
        raise ShardmillError(f"{path}: no result.json of measure.py that this shardmill reads: {problem}")
    return content


def of_build(path: Path, content: Json, manifest: Json) -> Evidence | None:
    """Return what a result says of a build.

    None where none of its variants has the build's packages, compiled as they are.

    Builds may share their packages and differ in the bundles that they load, or in the widths of their passes.
    """
    packages = {part: entry["files"] for part, entry in manifest["packages"].items()}
    apart = any("bundles" in part["program"] for part in manifest["parts"])
    told = manifest.get("reshape_frequency", INFREQUENT)  # older kits say nothing of it, nor do those of fixed shapes
    variants = [
        variant
        for variant in content["variants"].values()
        if variant["artifacts"] == packages and (variant["described"].get("bundles") == APART) == apart
    ]
    variants = [one for one in variants if one["described"].get("reshape_frequency") in (None, told)]
    variants.sort(key=lambda variant: variant["described"]["widths"] != manifest.get("widths"))  # its own passes first
    by_context = {_context(variant): variant for variant in reversed(variants)}
    found = [Evidence(path, content, by_context[slots]) for slots in sorted(by_context, reverse=True)]
    return replace(found[0], shorter=tuple(found[1:])) if found else None


def _context(variant: Json) -> int:
    return int(variant["described"].get("context") or 0)


def _system_of(content: Json) -> str:
    """Return where a result was measured, for a person."""
    machine, engine = content["machine"], content["engine"]["name"]
    by = "" if engine == COREML else f", {engine}"
    return f"{machine['chip']}, {machine['os']} {machine['system']} ({machine['build']}){by}"


def file_name(content: Json) -> str:
    """Return the name of a result among a build's evidence: by chip and system."""
    system = _system_of(content)
    plain = re.sub(r"[^a-z0-9.]+", "-", system.lower()).strip("-")
    if system.isascii() and len(plain) <= LONGEST:
        return f"{plain}.json"
    return f"{plain[:LONGEST]}-{hashlib.sha256(system.encode()).hexdigest()[:8]}.json"


def _is_trouble(key: str, line: Json) -> bool:
    """Return whether a line tells of something that went wrong with the build as it is used.

    The probes of a bisection are to fail, and how else a program may be loaded says nothing of the build.
    """
    return line["status"] in TROUBLE and "/bisect" not in key and not is_beside(key)
