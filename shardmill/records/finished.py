"""What a finished build consists of: its files, the verdicts that each part must have, and what they must say.

model.json names the parts and their files. provenance.json names these files, the verdicts and each step's receipt.
Whoever makes, checks or passes on a build asks this module, so that what is demanded is what is made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import dumps, read_json
from shardmill.forms.recipe import RULES, SEARCH, Recipe, read_recipe
from shardmill.gates import by_bits, required
from shardmill.gates.required import Number
from shardmill.gates.thresholds import Threshold
from shardmill.plan import Part, load_part
from shardmill.records.attest import gate_statement
from shardmill.records.names import RECEIPT, SOURCE
from shardmill.runtime.judged import GATES
from shardmill.runtime.manifest import (
    COMPILER,
    COMPLETE,
    MARK,
    entries,
    of_the_stack,
    own_chain,
    read_manifest,
    verify_width,
)

ATTESTATION, RESULTS = "provenance.json", "test-results.jsonl"
RECIPE, SEARCHED = "precision.json", "search.json"
PARITY, RESIDENCY, WITNESS, STACK = "parity", "residency", "witness", "stack"
PARTS, PACKAGES, COMPILED, CODES = "parts", "packages", "compiled", "codes"
Fault = tuple[str, str]  # a file of the build, and what is wrong with it
Steps = Mapping[str, Mapping[str, Any]]  # receipts by the names of their steps: "packages/head_0"


def manifest_files(model: Mapping[str, Any], manifest: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of model.json and of every file it names."""
    yield manifest.name, hash_file(manifest)
    for entry in entries(model):
        if "sha256" not in entry and "files" not in entry:
            raise ShardmillError(f"{manifest}: no sha256 of {entry['path']}; delete it and build again")
        yield from named_files(entry)


def named_files(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of every file that an entry of model.json names."""
    if "sha256" in entry:
        yield entry["path"], entry["sha256"]
    for name, sha in entry.get("files", {}).items():
        yield f"{entry['path']}/{name}", sha


def check_files(model: Mapping[str, Any], build: Path) -> None:
    """Raise ShardmillError where a file is not the one that a manifest's content names."""
    for entry in entries(model):
        for name, sha in named_files(entry):
            if not (build / name).is_file() or hash_file(build / name) != sha:
                made = f"{SOURCE}{RECEIPT}" if name.startswith(f"{SOURCE}/") else entry["path"]
                what = "not the file that was made and judged"
                raise ShardmillError(f"{build / name}: {what}; remove {build / made} and build again")


def attested(attestation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of every file that provenance.json covers."""
    predicate = attestation["predicate"]
    definition = predicate["buildDefinition"]
    for row in (*attestation["subject"], *predicate["runDetails"]["byproducts"]):
        yield row["name"], row["digest"]["sha256"]
    for row in definition["resolvedDependencies"]:
        if row["name"].startswith(f"{SOURCE}/"):
            yield row["name"], row["digest"]["sha256"]
    for name, receipt in definition["internalParameters"]["steps"].items():
        yield f"{name}{RECEIPT}", hashlib.sha256(dumps(receipt).encode()).hexdigest()
        yield from recorded_outputs(name, receipt)


def recorded_outputs(name: str, receipt: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of a step's outputs, given its receipt and the receipt's path without the suffix."""
    for output, place in receipt.get("paths", {}).items():
        path = PurePosixPath(name).parent / place
        files = receipt.get("files", {}).get(output)
        yield from (
            ((f"{path}/{file}", sha) for file, sha in files.items())
            if files
            else ((str(path), receipt["outputs"][output]),)
        )


def steps_of(statement: Mapping[str, Any]) -> Steps:
    """Return the receipts of the steps in provenance, by the step's name."""
    steps: Steps = statement["predicate"]["buildDefinition"]["internalParameters"]["steps"]
    return steps


def verdict_hashes(steps: Steps) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of every gate's verdict, given the receipts by step."""
    for name, receipt in steps.items():
        if "verdict" in receipt.get("outputs", {}):
            yield f"{name}.json", receipt["outputs"]["verdict"]


def gate_statements(build: Path, paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return a statement of each gate's verdict about the files that it judged, in the order of the verdicts' paths.

    Args:
        build: the build's folder.
        paths: the verdicts.
    """
    files = _files_by_part(read_manifest(build, COMPLETE))
    statements = []
    for path in sorted(paths):
        verdict = read_json(path)
        judged = files.get(verdict["part"]) or [file for each in files.values() for file in each]  # one, or the stack
        name = path.relative_to(build).with_suffix("").as_posix()
        statements.append(gate_statement(name, hash_file(path), verdict, judged))
    return statements


def _files_by_part(model: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return (path, sha256) of every file of each part's package and bundle."""
    return {
        part["name"]: [*named_files(model["packages"][part["name"]]), *named_files(part["program"])]
        for part in model["parts"]
    }


def verdicts(model: Mapping[str, Any], witnessed: bool) -> dict[str, str]:
    """Return the verdicts that a build must have: the part that each one judges, by the verdict's step.

    Args:
        model: model.json's content.
        witnessed: whether the config asks for a witness.
    """
    gates = [gate for gate in sorted(GATES) if gate != WITNESS or witnessed]
    judged = {f"{gate}/{part['name']}": part["name"] for gate in gates for part in model["parts"]}
    return judged | {f"{PARITY}/{STACK}": STACK}


def check_verdicts(model: Mapping[str, Any], witnessed: bool, steps: Iterable[str]) -> None:
    """Raise ShardmillError unless these are the steps of the verdicts that a build must have."""
    wanted, present = set(verdicts(model, witnessed)), set(steps)
    for name in sorted(wanted ^ present):
        what = "there is no such verdict" if name in wanted else "judges no part of model.json"
        raise ShardmillError(f"{name}.json: {what}; remove model.json and build again")


def step_faults(model: Mapping[str, Any], statement: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield where model.json and provenance.json do not know the same parts, or a part lacks a verdict.

    Args:
        model: model.json's content.
        statement: provenance.json's content.
    """
    config, steps = _config_of(statement), steps_of(statement)
    parts = {part["name"] for part in model["parts"]}
    folders = {PARTS, PACKAGES, COMPILED} | ({CODES} if config["convert"].get("calibration") else set())
    wanted = {f"{folder}/{name}" for folder in folders for name in parts}
    wanted |= verdicts(model, bool(config.get("witness"))).keys()
    planned = {path.removesuffix(".json") for path in steps["plan"]["paths"].values()} - {"plan", f"{PARTS}/embedding"}
    known = planned | {name for name in steps if name.split("/")[0] in {*folders, *GATES}}
    yield from ((ATTESTATION, f"has no receipt of {name}") for name in sorted(wanted - known))
    yield from ((ATTESTATION, f"{name} belongs to no part of model.json") for name in sorted(known - wanted))


def _config_of(statement: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config in provenance."""
    config: Mapping[str, Any] = statement["predicate"]["buildDefinition"]["externalParameters"]["config"]
    return config


@dataclass(frozen=True)
class Records:
    """A finished build as its records describe it.

    Attributes:
        model: model.json's content.
        config: the config, as provenance.json has it.
        steps: the receipts by step.
        parts: the parts of model.json, by name.
        recipe: the form of each matrix.
        search: search.json's content; None without a search.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    steps: Steps
    parts: Mapping[str, Part]
    recipe: Recipe
    search: Mapping[str, Any] | None

    @property
    def portable(self) -> bool:
        """Return whether the portable engine judged the build, and not Core ML."""
        return all(self.steps[f"{COMPILED}/{name}"]["engine"]["name"] == "portable" for name in self.parts)

    @property
    def verdicts(self) -> dict[str, str]:
        """Return the part that each verdict judges, by the verdict's step."""
        return verdicts(self.model, bool(self.config.get("witness")))


def read_records(build: Path, statement: Mapping[str, Any]) -> Records:
    """Return what a build's records say, given provenance.json's content.

    Raises ShardmillError, LookupError or another error of Python's if the records are not those of a build.
    """
    model = read_manifest(build, COMPLETE)
    parts = {row["name"]: load_part(build / PARTS / f"{row['name']}.json") for row in model["parts"]}
    search = read_json(build / SEARCHED) if (build / SEARCHED).is_file() else None
    recipe = read_recipe(read_json(build / RECIPE), RECIPE)
    return Records(model, _config_of(statement), steps_of(statement), parts, recipe, search)


def record_faults(records: Records) -> Iterator[Fault]:
    """Yield where the records of a build contradict each other; `step_faults` has found none."""
    yield from _recipe_faults(records)
    for name in records.parts:
        yield from _part_faults(records, name)
    yield from _engine_faults(records)


def _part_faults(records: Records, name: str) -> Iterator[Fault]:
    """Yield where a part's files are not its steps' outputs, or its gates judged other files."""
    steps, model = records.steps, records.model
    program = next(part["program"] for part in model["parts"] if part["name"] == name)
    made = {PACKAGES: ("package", model["packages"][name]), COMPILED: ("bundle", program)}
    for folder, (output, entry) in made.items():
        if steps[f"{folder}/{name}"].get("files", {}).get(output) != entry.get("files"):
            yield "model.json", f"{entry['path']} is not what the receipt of {folder}/{name} names"
    hashes = {output: steps[f"{folder}/{name}"]["outputs"][output] for folder, (output, _) in made.items()}
    for gate in (step for step, part in records.verdicts.items() if part == name):
        if {key: steps[gate]["inputs"].get(key) for key in hashes} != hashes:
            yield f"{gate}.json", f"judged other bytes than {PACKAGES}/{name} and {COMPILED}/{name}"
    judged, used = (steps[f"{step}/{name}"]["inputs"].get("codes") for step in (PARITY, PACKAGES))
    if judged != used:
        yield f"{PARITY}/{name}.json", "judged other codes than the package was made of"
    if name in {part["name"] for part in of_the_stack(model)["parts"]}:
        whole = set(steps[f"{PARITY}/{STACK}"]["inputs"].values())
        if not whole >= set(hashes.values()):
            yield f"{PARITY}/{STACK}.json", f"judged a stack without {name}"


def _engine_faults(records: Records) -> Iterator[Fault]:
    """Yield where a verdict's engine is not the one that the programs were compiled for."""
    compilers = {part["name"]: part["program"].get(COMPILER, {}).get("name") for part in records.model["parts"]}
    for name, engine in compilers.items():
        compiled = records.steps[f"{COMPILED}/{name}"]["engine"]["name"]
        if engine not in (None, compiled):
            yield "model.json", f"{name} was compiled by {engine}, by its receipt by {compiled}"
        if compiled != ("portable" if records.portable else "coreml"):
            yield f"{COMPILED}/{name}{RECEIPT}", f"its engine is {compiled}, another part's is not"


def _recipe_faults(records: Records) -> Iterator[Fault]:
    """Yield where precision.json is not what the config or the search asks for; a file's content is not at hand."""
    precision, search = records.config["convert"].get("precision"), records.search
    if (search is not None) != (precision == SEARCH):
        yield SEARCHED, f"is no part of a build with convert.precision: {precision}, or is missing"
        return
    if search:
        nats = sum(search["costs"][path][name] for path, name in search["forms"].items())
        if not _alike(search["estimate"]["perplexity"], math.exp(nats)):
            yield (
                SEARCHED,
                f"estimates {search['estimate']['perplexity']}, and its costs add up to {math.exp(nats):.8g}",
            )
    if precision in RULES:
        wanted = replace(RULES[precision], matrices=search["forms"]) if search else RULES[precision]
        of_tower = records.config.get("images") or records.config.get("audio") or {}
        wanted = replace(wanted, towers=of_tower.get("form", ""))
        asked = wanted.within({path: one for part in records.parts.values() for path, one in part.named_shapes.items()})
        if (records.recipe.default, records.recipe.matrices) != (asked["default"], asked["matrices"]):
            yield RECIPE, f"is not what convert.precision: {precision} gives"


@dataclass(frozen=True)
class Demand:
    """What a verdict must say.

    Attributes:
        part: the part that it judges.
        engine: the name of the engine that judged it.
        numbers: what it must have measured.
        limits: what names its thresholds, as in the verdict.
        thresholds: of each number that may be in it, by name.
    """

    part: str
    engine: str
    numbers: Sequence[Number]
    limits: Mapping[str, Any]
    thresholds: Mapping[str, Threshold]


def demand(records: Records, step: str, findings: Sequence[Mapping[str, Any]] = ()) -> Demand:
    """Return what the verdict of a step must say; `findings` are those that a verdict on residency has."""
    gate, name, portable = step.split("/")[0], records.verdicts[step], records.portable
    verify = 1 if MARK in records.model else verify_width(records.model)
    part, limits = records.parts.get(name), dict[str, Any]()
    if part is None:
        chain = [records.parts[row["name"]] for row in own_chain(records.model)["parts"]]
        limits = by_bits.stack_limits(chain, records.recipe, records.search)
        numbers = required.stack_numbers(records.model, portable)
    elif gate == PARITY:
        limits = by_bits.part_limits(part, records.recipe)
        numbers = required.part_numbers(part, verify, portable, "codes" in records.steps[step]["inputs"])
    elif gate == RESIDENCY:
        numbers = required.placement_numbers(findings, portable)
    else:
        numbers = required.witness_numbers(part, verify, portable)
    engine = "portable" if portable else "coreml"
    return Demand(name, engine, tuple(numbers), limits, by_bits.thresholds_of(limits))


def verdict_faults(verdict: Mapping[str, Any], wanted: Demand) -> Iterator[str]:
    """Yield what a verdict says beside, or leaves out of, what it must say; its numbers are judged by `row_fault`."""
    if verdict["part"] != wanted.part:
        yield f"is about {verdict['part']}"
    engine = verdict["engine"]["name"]
    if engine != wanted.engine:
        yield f"its engine is {engine}, and the programs are {wanted.engine}'s"
    evidence = {"portable": "predicted", "coreml": "measured"}[wanted.engine]
    if verdict.get("evidence", evidence) != evidence:
        yield f"its evidence is {verdict['evidence']}, which {wanted.engine} does not give"
    yield from _other_limits(verdict, wanted.limits)
    rows, skipped = list(verdict["gate"]), verdict.get("not_run", {})
    for number in sorted(wanted.numbers, key=lambda one: -len(one.detail)):  # the longest detail first
        row = next((one for one in rows if number.is_in(one)), None)
        if row is not None:
            rows.remove(row)
        elif not (number.may_be_skipped and skipped.get(number.name)):
            where = f" ({number.detail})" if number.detail else ""
            yield f"has no {number.name}{where}" + (": it must not be skipped" if number.name in skipped else "")
    if "perplexity_ratio" in skipped and "top1_agreement" not in skipped:
        yield "has top1_agreement and no perplexity_ratio, though either needs a text that the original can read"


def _other_limits(verdict: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a verdict names other limits than precision.json and search.json give."""
    for key in ("limits", "shares", "budget"):
        said: Any = verdict.get(key)
        expected: Any = wanted.get(key)
        if said == expected:
            continue
        tables = isinstance(said, Mapping) and isinstance(expected, Mapping) and said.keys() == expected.keys()
        if not tables or not all(_alike(value, expected[name]) for name, value in said.items()):
            yield f"is judged by {key} {said}, its records give {expected}"


def _alike(value: Any, other: float) -> bool:
    """Return whether two numbers are equal but for the last digits, which a logarithm has from the machine."""
    return isinstance(value, int | float) and math.isclose(value, other, rel_tol=1e-9)


def row_fault(row: Mapping[str, Any], table: Mapping[str, Threshold]) -> str:
    """Return why a number of a verdict does not count, or an empty string if it does.

    A model's own limit, with `limit_why`, counts if it is stricter than the table's.
    """
    name, value = row.get("name"), cast(Any, row.get("value"))
    threshold = table.get(str(name))
    if threshold is None:
        return f"{name} is no number that this shardmill knows"
    stated = _stated(row, threshold)
    if stated is None:
        return f"{name} must be {threshold.told}, and its verdict says {row.get('threshold')}"
    if "limit_why" in row:
        threshold = stated
    measured = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not measured or not threshold.holds(float(value)):
        return f"{name} is {value}, must be {threshold.told}"
    return "" if row.get("passed") is True else f"{name} did not pass"


def _stated(row: Mapping[str, Any], threshold: Threshold) -> Threshold | None:
    """Return a row's threshold; None if it is no number, has the other direction, or is looser than the known one."""
    sign, _, limit = str(row.get("threshold")).partition(" ")
    try:
        stated = replace(threshold, limit=float(limit))
    except ValueError:
        return None
    own_sign, _, shown = threshold.told.partition(" ")
    same = replace(threshold, limit=float(shown))  # with as many digits as the row's
    return stated if sign == own_sign and math.isfinite(stated.limit) and same.holds(stated.limit) else None
