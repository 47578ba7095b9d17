"""Provenance: the checkpoint's files, the packages' hashes, the tools, and the action key of every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.report.read import Build
from shardmill.report.wording import engine_text


@dataclass(frozen=True)
class SourceFile:
    """A file of the checkpoint."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StepRecord:
    """One receipt."""

    name: str  # "packages/head_0"
    step: str
    key: str
    code: str
    outputs: tuple[tuple[str, str], ...]  # name, content hash
    engine: str


@dataclass(frozen=True)
class SourceOrigin:
    """The origin of the build."""

    place: str  # repository, or the folder that the config names
    commit: str
    files: tuple[SourceFile, ...]
    packages: tuple[tuple[str, str], ...]  # part, tree hash of its .mlpackage ("" if no receipt has it)
    tools: tuple[tuple[str, str], ...]  # package, version(s)
    steps: tuple[StepRecord, ...]
    settings: tuple[tuple[str, str], ...]  # dotted key, value


def origin(build: Build) -> SourceOrigin:
    """Return provenance from the receipts and the source record."""
    files = build.source["files"]
    place = build.source["repo"] or build.settings["source"]["path"] or "not recorded"
    return SourceOrigin(
        place=place,
        commit="local folder, no commit" if build.source["commit"] == "local" else build.source["commit"],
        files=tuple(SourceFile(name, file["size"], file["sha256"]) for name, file in sorted(files.items())),
        packages=tuple((p.name, _package_hash(build, p.name)) for p in build.pieces if p.kind != "embedding"),
        tools=_tool_versions(build),
        steps=tuple(_step_record(name, receipt) for name, receipt in sorted(build.receipts.items())),
        settings=tuple(_flattened(build.settings)),
    )


def _package_hash(build: Build, part: str) -> str:
    """Return the hash of a part's package from its receipt."""
    receipt = build.receipts.get(f"packages/{part}", {"outputs": {}})
    return str(receipt["outputs"].get("package", ""))


def _tool_versions(build: Build) -> tuple[tuple[str, str], ...]:
    """Return the versions of the tools that determined bytes; several versions if steps differ."""
    found: dict[str, set[str]] = {}
    for receipt in build.receipts.values():
        for name, version in receipt["packages"].items():
            found.setdefault(name, set()).add(version)
    return tuple((name, ", ".join(sorted(versions))) for name, versions in sorted(found.items()))


def _step_record(name: str, receipt: Mapping[str, Any]) -> StepRecord:
    """Return one receipt's identity."""
    return StepRecord(
        name=name,
        step=receipt["step"],
        key=receipt["key"],
        code=receipt["code"],
        outputs=tuple(sorted(receipt["outputs"].items())),
        engine=engine_text(receipt["engine"]) if "engine" in receipt else "any",
    )


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as dotted keys; None becomes "not set"."""
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            rows += _flattened(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", "not set" if value is None else str(value)))
    return rows
