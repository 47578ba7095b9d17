"""One file of evidence: the check that it is whole, the build that it describes, and its measurements."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from kit_runner.kit import KIND, RESULT_FORMAT, STATUSES
from kit_runner.plan import is_beside
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import json_object, read_sealed
from shardmill.printable import printable

LONGEST_MESSAGE = 200  # characters of a message
Size = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 53)]
Figure = Annotated[float, Field(strict=True, ge=0, le=1e18, allow_inf_nan=False)]


@checked_dataclass(frozen=True)
class Machine:
    """The machine that measured."""

    chip: str
    os: str
    system: str
    build: str
    memory_bytes: Size
    python: str
    packages: dict[str, str]


@checked_dataclass(frozen=True)
class Described:
    """A build's form: only the fields that are used."""

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
    """The value of a measurement: only the fields that are read."""

    evidence: Literal["measured", "predicted"] | None = None
    counts: dict[str, Size] | None = None
    rows: list[EvidenceRow] | None = None
    tokens: Size | None = None
    agree: Size | None = None
    programs: Size | None = None
    placed: Size | None = None
    of: Size | None = None


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
    """The engine that ran the programs."""

    name: str


@checked_dataclass(frozen=True)
class Probe:
    """A program of a question."""

    name: str
    kind: str
    bytes: Size | None = None
    group: Size | None = None


@checked_dataclass(frozen=True)
class Question:
    """A question about the system."""

    name: str
    text: str
    compares: bool
    probes: list[Probe]


@checked_dataclass(frozen=True)
class Questions:
    """The questions of a kit, and the measurements of their probes."""

    asked: list[Question]
    measurements: dict[str, Line]


@checked_dataclass(frozen=True)
class Result:
    """The whole file."""

    format: Literal[RESULT_FORMAT]  # type: ignore[valid-type]
    kind: Literal[KIND]  # type: ignore[valid-type]
    kit: str
    machine: Machine
    engine: DeviceEngine
    variants: dict[str, Variant]
    questions: Questions | None = None


def _evidence_faults(content: Any) -> Iterator[str]:
    """Yield the first fault that keeps JSON from being a result."""
    try:
        result = TypeAdapter(Result).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = "not there" if first["type"] in ("missing", "missing_argument") else first["msg"]
        yield printable(f"{where}: {message[0].lower()}{message[1:]}")[:LONGEST_MESSAGE]
        return
    for name, variant in result.variants.items():
        for key, line in variant.measurements.items():
            plan = key.rpartition("/")[2].startswith("residency.") and line.status == "ok"
            if plan and (line.value.rows is None or line.value.evidence is None):
                yield printable(
                    f"variants.{name}.measurements.{key}.value: has no rows, or no word on whether they were measured"
                )[:LONGEST_MESSAGE]


Json = Mapping[str, Any]
COREML = "coreml"
INFREQUENT = "infrequent"  # Core ML's hint for changing shapes if model.json does not set it
APART = "each"  # a kit's value of `bundles` if each function has a separate bundle
LONGEST = 100  # characters of a file's name; a longer name is cut and ends with a hash
TROUBLE = ("wrong", "refused", "crashed", "timeout")


@dataclass(frozen=True)
class Evidence:
    """The results of one run of measure.py for one build.

    Attributes:
        path: the file.
        content: the content of the whole file.
        variant: the part of the content that is about the build.
        shorter: the results for each shorter context in the build's programs, the longest context first.
    """

    path: Path
    content: Json
    variant: Json
    shorter: tuple[Evidence, ...] = ()

    @property
    def is_measured(self) -> bool:
        """Return whether Apple's Core ML ran; figures of another engine do not count for a device."""
        return bool(self.content["engine"]["name"] == COREML)

    @property
    def system(self) -> str:
        """Return chip, system, and the engine if it is not Core ML, for a person."""
        return _system_of(self.content)

    @property
    def lines(self) -> Json:
        """Return the measurements by key: UNIT/NAME for a program, NAME for all programs together."""
        lines: Json = self.variant["measurements"]
        return lines

    @property
    def context(self) -> int:
        """Return the slots of the measured context; 0 for an encoder."""
        return _context(self.variant)

    @property
    def widths(self) -> list[int]:
        """Return the widths that were to be measured."""
        return sorted(self.variant["described"]["widths"])

    @cached_property
    def troubles(self) -> list[tuple[str, str, str]]:
        """Return key, status and detail of each measurement that went wrong, and of each bisection."""
        troubles = [(key, line["status"], line["detail"]) for key, line in self.lines.items() if _is_trouble(key, line)]
        blamed = [(key, "bisected", line["detail"]) for key, line in self.lines.items() if key.endswith("/bisect")]
        further = [
            (f"{key} in {one.context} slots", status, detail)
            for one in self.shorter
            for key, status, detail in one.troubles
        ]
        return [*sorted([*troubles, *blamed]), *further]

    def timing(self, key: str, name: str) -> float | None:
        """Return a figure of a measurement, if it was taken."""
        value = self.lines.get(key, {}).get("timing", {}).get(name)
        return float(value) if isinstance(value, int | float) else None

    def total(self, ending: str, name: str) -> float | None:
        """Return the sum of a figure over all programs; None if a program lacks the figure."""
        keys = [key for key in self.lines if key.endswith(f"/{ending}")]
        figures = [self.timing(key, name) for key in keys]
        known = [value for value in figures if value is not None]
        return sum(known) if known and len(known) == len(figures) else None

    def residency(self, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part's compute plans in the form of residency/PART.json."""
        rows = []
        for key, line in sorted(self.lines.items()):
            unit, _, name = key.rpartition("/")
            if unit.partition(".")[0] == part and name.startswith("residency.") and line["status"] == "ok":
                shape, evidence = name.removeprefix("residency."), line["value"]["evidence"]
                rows += [{**row, "shape": shape, "evidence": evidence, "rules": ()} for row in line["value"]["rows"]]
        return rows


def is_result(path: Path) -> bool:
    """Return whether a file calls itself a result of measure.py; False if it can't be read."""
    return json_object(path).get("kind") == KIND


def read_result(path: Path) -> dict[str, Any]:
    """Return a result of measure.py, checked. Raises ShardmillError if it is not a result, or has changed."""
    try:
        content = read_sealed(path)
    except UnreadableError as error:
        if isinstance(error.__cause__, OSError):
            raise ShardmillError(f"{path}: {error.__cause__.strerror}") from error
        raise ShardmillError(
            f"{path}: no result.json of measure.py, or not as that wrote it; take the one that it wrote, again"
        ) from error
    for problem in _evidence_faults(content):
        raise ShardmillError(f"{path}: no result.json of measure.py that this shardmill reads: {problem}")
    return content


def of_build(path: Path, content: Json, manifest: Json) -> Evidence | None:
    """Return a result's evidence for a build.

    Return None if no variant was measured with the build's packages, byte for byte.

    Builds may share their packages and differ in the bundles that they load, or in the widths of their passes.
    """
    packages = {part: entry["files"] for part, entry in manifest["packages"].items()}
    apart = any("bundles" in part["program"] for part in manifest["parts"])
    told = manifest.get("reshape_frequency", INFREQUENT)  # older kits do not record it, nor do kits of fixed shapes
    variants = [
        variant
        for variant in content["variants"].values()
        if variant["artifacts"] == packages and (variant["described"].get("bundles") == APART) == apart
    ]
    variants = [one for one in variants if one["described"].get("reshape_frequency") in (None, told)]
    variants.sort(key=lambda variant: variant["described"]["widths"] != manifest.get("widths"))  # its own widths first
    by_context = {_context(variant): variant for variant in reversed(variants)}
    evidence = [Evidence(path, content, by_context[slots]) for slots in sorted(by_context, reverse=True)]
    return replace(evidence[0], shorter=tuple(evidence[1:])) if evidence else None


def _context(variant: Json) -> int:
    return int(variant["described"].get("context") or 0)


def _system_of(content: Json) -> str:
    """Return the machine and the engine of a result, for a person."""
    machine, engine = content["machine"], content["engine"]["name"]
    by = "" if engine == COREML else f", {engine}"
    return f"{machine['chip']}, {machine['os']} {machine['system']} ({machine['build']}){by}"


def file_name(content: Json) -> str:
    """Return the file name of a result among a build's evidence, which shows chip and system."""
    system = _system_of(content)
    plain = re.sub(r"[^a-z0-9.]+", "-", system.lower()).strip("-")
    if system.isascii() and len(plain) <= LONGEST:
        return f"{plain}.json"
    return f"{plain[:LONGEST]}-{hashlib.sha256(system.encode()).hexdigest()[:8]}.json"


def _is_trouble(key: str, line: Json) -> bool:
    """Return whether a line reports a failure of the build in normal use.

    The probes of a bisection may fail, and other ways to load a program do not count for the build.
    """
    return line["status"] in TROUBLE and "/bisect" not in key and not is_beside(key)
