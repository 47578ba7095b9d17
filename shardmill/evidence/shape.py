"""What a result of the lane has to look like, to the last number that anything here computes with.

docs/device.schema.json says the same to others. What is not named here may be anything: newer lanes say more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from shardmill.lane.results import FORMAT, KIND, STATUSES
from shardmill.printable import printable

LONGEST = 200  # characters of a message
Size = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 53)]
Figure = Annotated[float, Field(strict=True, ge=0, le=1e18, allow_inf_nan=False)]


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    chip: str
    os: str
    system: str
    build: str
    memory_bytes: Size
    python: str
    packages: dict[str, str]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Row:
    """An operation of a compute plan."""

    output: str
    operation: str
    status: str


@dataclass(frozen=True)
class Value:
    """What a measurement found, as far as it is read."""

    evidence: Literal["measured", "predicted"] | None = None
    counts: dict[str, Size] | None = None
    rows: list[Row] | None = None
    tokens: Size | None = None
    agree: Size | None = None
    programs: Size | None = None


@dataclass(frozen=True)
class Line:
    """A measurement."""

    status: Annotated[str, Field(pattern=f"^({'|'.join(STATUSES)})$")]
    value: Value
    timing: dict[str, Figure | None]
    detail: str


@dataclass(frozen=True)
class Variant:
    """A build in a context."""

    model: str
    source: dict[str, Any]
    described: Described
    artifacts: dict[str, dict[str, str]]
    measurements: dict[str, Line]


@dataclass(frozen=True)
class Engine:
    """What ran the programs."""

    name: str


@dataclass(frozen=True)
class Result:
    """The whole file."""

    format: Literal[FORMAT]  # type: ignore[valid-type]
    kind: Literal[KIND]  # type: ignore[valid-type]
    kit: str
    machine: Machine
    engine: Engine
    variants: dict[str, Variant]


def faults(content: Any) -> Iterator[str]:
    """What keeps JSON from being a result, the first of it."""
    try:
        found = TypeAdapter(Result).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = "not there" if first["type"] in ("missing", "missing_argument") else first["msg"]
        yield printable(f"{where}: {message[0].lower()}{message[1:]}")[:LONGEST]
        return
    for name, variant in found.variants.items():
        for key, line in variant.measurements.items():
            plan = key.rpartition("/")[2].startswith("residency.") and line.status == "ok"
            if plan and (line.value.rows is None or line.value.evidence is None):
                yield printable(f"variants.{name}.measurements.{key}.value: has no rows, or not whose they are")[
                    :LONGEST
                ]
