"""The files of a build as one value, the only source of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.evidence.build import measured_verdicts
from shardmill.evidence.file import Evidence
from shardmill.files import read_json

Json = Mapping[str, Any]


@dataclass(frozen=True)
class PartRow:
    """One part of the plan with its sizes in bytes; None stands for the size of a missing file."""

    name: str
    kind: str  # "layers", "head", "encoder" or "embedding"
    start: int
    end: int
    tensors: int
    parameters: int
    weight_file: int | None  # the largest single file of weights, which rule W1 limits
    total: int | None  # all files of the package, or the host's table


@dataclass(frozen=True)
class Build:
    """The content of the build's files."""

    model: Json  # model.json
    plan: Json
    source: Json  # source.receipt.json
    pieces: tuple[PartRow, ...]
    verdicts: Mapping[str, tuple[Json, ...]]  # the gates' files, by the folder that contains them
    speed: Json | None  # None if the config leaves out the benchmark
    receipts: Mapping[str, Json]  # by path without ".receipt.json", relative to the build
    settings: Json  # the config
    pipeline: Sequence[Json]  # the steps, see pipeline.snakefile.listed_steps
    search: Json | None = None  # the result of the search for forms, if the build has one
    devices: Sequence[Evidence] = ()  # measurements of these programs on other machines
    stale: Sequence[str] = ()  # files of evidence about other programs
    predicted: Json | None = None  # predicted costs of the Neural Engine's arithmetic, if the build has them
    points: Mapping[str, Json] = field(default_factory=dict)  # predicted and measured costs of sets of forms, by name

    @property
    def encodes(self) -> bool:
        """Return whether the model is an encoder."""
        return bool(self.plan["kind"] == "encoder")

    @property
    def turned(self) -> float:
        """Return how close two logits must be for another width of a pass to swap them, on the benchmark's engine."""
        measured_on = self.speed["engine"]["name"] if self.speed else ""
        return float(self.model.get("margin", 0.0)) if measured_on == "coreml" else 0.0

    @property
    def residency(self) -> tuple[Json, ...]:
        """Return the verdicts of the residency gate, part by part."""
        return self.verdicts.get("residency", ())

    @property
    def placed(self) -> tuple[Json, ...]:
        """Return the verdicts of the residency gate, with a device's measurements in place of predictions."""
        return measured_verdicts(self.residency, self.devices)

    @property
    def witness(self) -> tuple[Json, ...]:
        """Return the verdicts of parts on Apple's Core AI runtime; empty if the config does not ask for them."""
        return self.verdicts.get("witness", ())

    @property
    def parity(self) -> tuple[Json, ...]:
        """Return the verdicts of the parity gates, for each part and for the stack."""
        return self.verdicts.get("parity", ())


def read_receipts(paths: Sequence[Path], root: Path) -> dict[str, Json]:
    """Return receipts by the name of their artifact, for example `packages/head_0`."""
    return {path.relative_to(root).as_posix().removesuffix(".receipt.json"): read_json(path) for path in paths}


def read_verdicts(paths: Sequence[Path], root: Path) -> dict[str, tuple[Json, ...]]:
    """Return the gates' files by the folder under `root` that contains them."""
    verdicts: dict[str, tuple[Json, ...]] = {}
    for path in paths:
        folder = path.relative_to(root).parent.as_posix()
        verdicts[folder] = (*verdicts.get(folder, ()), read_json(path))
    return verdicts


def read_pieces(plan: Json, parts: Sequence[Path], artifacts: Sequence[Path]) -> tuple[PartRow, ...]:
    """Return the parts in the plan's order, with the sizes of their packages or tables."""
    described = {path.stem: read_json(path) for path in parts}
    made = {artifact.stem: artifact for artifact in artifacts}
    return tuple(_piece(row, described[row["name"]], made.get(row["name"])) for row in plan["parts"])


def _piece(row: Json, part: Json, made: Path | None) -> PartRow:
    """Return one part, from its row in plan.json, its parts/P.json, and its package or table."""
    sizes = _file_sizes(made) if made is not None and made.exists() else {}
    weights = [size for name, size in sizes.items() if "weights/" in name or name.endswith(".safetensors")]
    return PartRow(
        name=row["name"],
        kind=row["kind"],
        start=row["start"],
        end=row["end"],
        tensors=len(part["tensors"]),
        parameters=row["parameters"],
        weight_file=max(weights, default=None),
        total=sum(sizes.values()) if sizes else None,
    )


def _file_sizes(path: Path) -> dict[str, int]:
    """Return the size of each file in a folder by relative path, or the size of a single file."""
    if path.is_file():
        return {path.name: path.stat().st_size}
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}
