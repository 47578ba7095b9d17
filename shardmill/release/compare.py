"""What differs between two builds, from the checkpoint's tensors to operations, weights, verdicts and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardmill.attest import read_provenance, versions
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import flattened, read_json
from shardmill.pipeline.audit import ATTESTATION
from shardmill.pipeline.cache.receipts import key_differences
from shardmill.pipeline.provenance import verdict_hashes
from shardmill.pipeline.task import SOURCE
from shardmill.plan import Part, load_part
from shardmill.runtime.manifest import COMPLETE, read_manifest

Steps = Mapping[str, Mapping[str, Any]]
INGREDIENTS = ("inputs", "params", "code", "packages")  # parts of a step's cache key


def subject_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of subjects that differ in their bytes or are in only one of two statements."""
    sets = [{(row["name"], row["digest"]["sha256"]) for row in one["subject"]} for one in (ours, theirs)]
    return sorted({name for name, _ in sets[0] ^ sets[1]})


def steps_of(statement: Mapping[str, Any]) -> Steps:
    """Return the receipts of the steps in provenance, by the step's name."""
    found: Steps = statement["predicate"]["buildDefinition"]["internalParameters"]["steps"]
    return found


def explain_difference(ours: Steps, theirs: Steps) -> list[str]:
    """Return a line for each step whose outputs differ, with the reason."""
    changed = {name for name in {*ours, *theirs} if _outputs(ours, name) != _outputs(theirs, name)}
    lines = []
    for name in sorted(changed):
        if name not in ours or name not in theirs:
            lines.append(f"{name}: only one build has this step")
            continue
        one, other = ({key: steps[name].get(key) for key in INGREDIENTS} for steps in (ours, theirs))
        found = key_differences(one, other)
        own = [key for key in found if not key.startswith("inputs.")]
        if own:
            lines.append(f"{name}: {', '.join(own)} differ")
        elif not found:
            lines.append(f"{name}: other bytes by the same key: another kind of processor, perhaps")
        else:
            lines.append(f"{name}: other inputs ({', '.join(key.removeprefix('inputs.') for key in found)})")
    return sorted(lines, key=lambda line: ("other inputs" in line, line))  # other inputs come last


def _outputs(steps: Steps, name: str) -> Any:
    return steps.get(name, {}).get("outputs")


Values = Mapping[str, Any]  # by a name that a person understands
MODEL, SPEED = "model.json", "benchmark/speed.json"
FIGURES = ("pass_seconds", "prefill", "break_even")


@dataclass(frozen=True)
class Difference:
    """A value that differs between two builds.

    Attributes:
        kind: the kind of value.
        name: the name of the value.
        before: the first build's value; None if it is missing.
        after: the second build's value; None if it is missing.
    """

    kind: str
    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Side:
    """One of the two builds."""

    build: Path

    @cached_property
    def statement(self) -> dict[str, Any]:
        """Return the build's provenance."""
        return read_provenance(self.build / ATTESTATION)

    @property
    def definition(self) -> dict[str, Any]:
        """Return the build definition in the provenance."""
        found: dict[str, Any] = self.statement["predicate"]["buildDefinition"]
        return found


def compare_builds(before: Side, after: Side) -> list[Difference]:
    """Return every difference, from the config to the measured figures.

    Raises:
        ShardmillError: a build is not finished, or is damaged.
    """
    readers = {
        "config": _config,
        "workflow": _workflow,
        "package": _packages,
        "checkpoint": _checkpoint,
        "tensor": _tensors,
        "part": _parts,
        "operations": _operations,
        "weights": _weights,
        "bytes": _bytes,
        "verdict": _verdicts,
        "figure": _figures,
    }
    for side in (before, after):
        read_manifest(side.build, COMPLETE)
    return [each for kind, read in readers.items() for each in _differing(kind, read(before), read(after))]


def reasons(before: Side, after: Side) -> list[str]:
    """Return a line for each step whose outputs differ, with the parts of its cache key that differ."""
    return explain_difference(steps_of(before.statement), steps_of(after.statement))


def _differing(kind: str, before: Values, after: Values) -> Iterator[Difference]:
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield Difference(kind, name, before.get(name), after.get(name))


def _config(side: Side) -> Values:
    return flattened(side.definition["externalParameters"]["config"])


def _workflow(side: Side) -> Values:
    return {row["name"]: row["uri"] for row in side.definition["resolvedDependencies"] if row["name"] == "workflow"}


def _packages(side: Side) -> Values:
    return versions(side.definition["resolvedDependencies"])


def _checkpoint(side: Side) -> Values:
    rows = [row for row in side.definition["resolvedDependencies"] if row["name"].startswith(SOURCE)]
    return {row["name"]: row.get("digest", {}).get("sha256") or row["uri"] for row in rows}


def _each_part(side: Side) -> list[Part]:
    return [load_part(path) for path in sorted((side.build / "parts").glob("*.json"))]


def _tensors(side: Side) -> Values:
    """Return type, shape and sha256 of each checkpoint tensor, or rows of a tensor, that a part contains."""
    constants = [tensor for part in _each_part(side) for tensor in part.tensors]
    rows = [each for tensor in constants for each in (tensor, *tensor.beside)]
    return {row.label: f"{row.dtype} {list(row.stored)} of sha256 {row.sha256[:12]}" for row in rows}


def _parts(side: Side) -> Values:
    return {part.name: f"{part.kind} {part.start} to {part.end}" for part in _each_part(side)}


def _programs(side: Side) -> Iterator[tuple[str, Any]]:
    """Yield the name and contents of each package, read by the reader of `shardmill inspect`."""
    from shardmill.imports import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.files.compare import read_contents

        for package in sorted((side.build / "packages").glob("*.mlpackage")):
            yield package.stem, read_contents(package)


def _operations(side: Side) -> Values:
    return {
        f"{name} {function.name}: {operation}": count
        for name, contents in _programs(side)
        for function in contents.functions
        for operation, count in function.operations
    }


def _weights(side: Side) -> Values:
    return {
        f"{name} {row.dtype}": f"{row.tensors} tensors, {row.elements} elements, {row.bytes} bytes"
        for name, contents in _programs(side)
        for row in contents.weights
    }


def _bytes(side: Side) -> Values:
    """Return the sha256 of every file of the model; model.json is hashed as it is on disk now."""
    gates = {name for name, _ in verdict_hashes(steps_of(side.statement))}
    built = {row["name"]: row["digest"]["sha256"] for row in side.statement["subject"] if row["name"] not in gates}
    return built | {MODEL: hash_file(side.build / MODEL)}


def _verdicts(side: Side) -> Values:
    found: dict[str, Any] = {}
    for name, _ in verdict_hashes(steps_of(side.statement)):
        try:
            rows = [(row["name"], _limit(row), row["value"]) for row in read_json(side.build / name)["gate"]]
        except (LookupError, TypeError) as error:
            raise ShardmillError(f"{side.build / name}: is no verdict of a gate; build again") from error
        found |= {f"{name.removesuffix('.json')}.{row} (must be {limit})": value for row, limit, value in rows}
    return found


def _limit(row: Mapping[str, Any]) -> str:
    """Return a limit in words; a model's own limit may be a different number in the other build."""
    return "<= the model's own limit" if "limit_why" in row else str(row["threshold"])


def _figures(side: Side) -> Values:
    """Return the benchmark's figures, which differ from run to run; empty without a benchmark."""
    speed = side.build / SPEED
    content = read_json(speed) if speed.is_file() else {}
    return flattened({key: content[key] for key in FIGURES if key in content})
