"""What differs between two builds, from the checkpoint's tensors to operations, weights, verdicts and figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import flattened, read_json
from shardmill.pipeline.cache.store import key_differences
from shardmill.plan import Part, load_part
from shardmill.records.attest import read_provenance, versions
from shardmill.records.finished import ATTESTATION, Steps, steps_of, verdict_hashes
from shardmill.records.names import SOURCE
from shardmill.runtime.manifest import COMPLETE, read_manifest

if TYPE_CHECKING:
    from portable_coreml.files.compare import Contents

INGREDIENTS = ("inputs", "params", "code", "packages")  # parts of a step's cache key


def subject_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of subjects that differ in their bytes or are in only one of two statements."""
    sets = [{(row["name"], row["digest"]["sha256"]) for row in one["subject"]} for one in (ours, theirs)]
    return sorted({name for name, _ in sets[0] ^ sets[1]})


def explain_difference(ours: Steps, theirs: Steps) -> list[str]:
    """Return a line for each step whose outputs differ, with the reason."""
    changed = {name for name in {*ours, *theirs} if _outputs(ours, name) != _outputs(theirs, name)}
    lines = []
    for name in sorted(changed):
        if name not in ours or name not in theirs:
            lines.append(f"{name}: only one build has this step")
            continue
        one, other = ({key: steps[name].get(key) for key in INGREDIENTS} for steps in (ours, theirs))
        differing = key_differences(one, other)
        direct = [key for key in differing if not key.startswith("inputs.")]
        if direct:
            lines.append(f"{name}: {', '.join(direct)} differ")
        elif not differing:
            lines.append(f"{name}: other bytes by the same key: another kind of processor, perhaps")
        else:
            lines.append(f"{name}: other inputs ({', '.join(key.removeprefix('inputs.') for key in differing)})")
    return sorted(lines, key=lambda line: ("other inputs" in line, line))  # other inputs come last


def _outputs(steps: Steps, name: str) -> Any:
    return steps.get(name, {}).get("outputs")


MODEL, SPEED = "model.json", "benchmark/speed.json"
FIGURES = ("pass_seconds", "prefill", "break_even")


@dataclass(frozen=True)
class Difference:
    """A value that differs between two builds, with the kind of the value; None stands for a missing value."""

    kind: str
    name: str
    before: Any
    after: Any


def compare_builds(before: Path, after: Path) -> list[Difference]:
    """Return every difference, from the config to the measured figures.

    Raises:
        ShardmillError: a build is not finished, or is damaged.
    """
    for build in (before, after):
        read_manifest(build, COMPLETE)
    ours, theirs = _values(before), _values(after)
    return [
        Difference(kind, name, ours[kind].get(name), theirs[kind].get(name))
        for kind in ours
        for name in sorted({*ours[kind], *theirs[kind]})
        if ours[kind].get(name) != theirs[kind].get(name)
    ]


def reasons(before: Path, after: Path) -> list[str]:
    """Return a line for each step whose outputs differ, with the parts of its cache key that differ."""
    ours, theirs = (steps_of(read_provenance(build / ATTESTATION)) for build in (before, after))
    return explain_difference(ours, theirs)


def _values(build: Path) -> dict[str, Mapping[str, Any]]:
    """Return everything that is compared, by kind, and by a name that a person understands."""
    statement = read_provenance(build / ATTESTATION)
    definition = statement["predicate"]["buildDefinition"]
    rows = definition["resolvedDependencies"]
    source = [row for row in rows if row["name"].startswith(SOURCE)]
    parts = [load_part(path) for path in sorted((build / "parts").glob("*.json"))]
    programs = list(_programs(build))
    verdicts = [name for name, _ in verdict_hashes(steps_of(statement))]
    files = {row["name"]: row["digest"]["sha256"] for row in statement["subject"] if row["name"] not in verdicts}
    speed = read_json(build / SPEED) if (build / SPEED).is_file() else {}
    return {
        "config": flattened(definition["externalParameters"]["config"]),
        "workflow": {row["name"]: row["uri"] for row in rows if row["name"] == "workflow"},
        "package": versions(rows),
        "checkpoint": {row["name"]: row.get("digest", {}).get("sha256") or row["uri"] for row in source},
        "tensor": dict(_tensors(parts)),
        "part": {part.name: f"{part.kind} {part.start} to {part.end}" for part in parts},
        "operations": {
            f"{name} {function.name}: {operation}": count
            for name, contents in programs
            for function in contents.functions
            for operation, count in function.operations
        },
        "weights": {
            f"{name} {row.dtype}": f"{row.tensors} tensors, {row.elements} elements, {row.bytes} bytes"
            for name, contents in programs
            for row in contents.weights
        },
        "bytes": files | {MODEL: hash_file(build / MODEL)},  # as model.json is on disk now
        "verdict": {key: value for name in verdicts for key, value in _numbers(build, name)},
        "figure": flattened({key: speed[key] for key in FIGURES if key in speed}),  # differ from run to run
    }


def _tensors(parts: Iterable[Part]) -> Iterator[tuple[str, str]]:
    """Yield type, shape and sha256 of each checkpoint tensor, or rows of a tensor, that a part contains."""
    for part in parts:
        for tensor in part.tensors:
            for row in (tensor, *tensor.beside):
                yield row.label, f"{row.dtype} {list(row.stored)} of sha256 {row.sha256[:12]}"


def _programs(build: Path) -> Iterator[tuple[str, Contents]]:
    """Yield the name and contents of each package, read by the reader of `shardmill inspect`."""
    from shardmill.imports import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.files.compare import read_contents

        for package in sorted((build / "packages").glob("*.mlpackage")):
            yield package.stem, read_contents(package)


def _numbers(build: Path, verdict: str) -> Iterator[tuple[str, Any]]:
    """Yield a verdict's numbers; a model's own limit may be a different number in the other build."""
    try:
        for row in read_json(build / verdict)["gate"]:
            limit = "<= the model's own limit" if "limit_why" in row else str(row["threshold"])
            yield f"{verdict.removesuffix('.json')}.{row['name']} (must be {limit})", row["value"]
    except (LookupError, TypeError) as error:
        raise ShardmillError(f"{build / verdict}: is no verdict of a gate; build again") from error
