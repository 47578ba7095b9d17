"""What a signed build proves: claims, signatures, and builders who got the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import parse_json, read_json
from shardmill.gates.thresholds import Threshold, thresholds_of
from shardmill.pipeline.attest import PROVENANCE as PROVENANCE_TYPE
from shardmill.pipeline.attest import read_provenance
from shardmill.pipeline.audit import ATTESTATION, CARD_RECORD, RESULTS, Audit, audit, is_signature
from shardmill.pipeline.steps.manifest import manifest_files
from shardmill.pipeline.steps.provenance import gate_statements, verdict_hashes
from shardmill.release.bundle import CARD, bundle_files
from shardmill.release.compare import steps_of
from shardmill.release.sign import (
    ATTESTATIONS,
    PROVENANCE,
    SIGNATURE,
    STATEMENTS,
    PublicKey,
    check_model,
    payloads,
    read_envelopes,
    signed_files,
    signers,
)
from shardmill.runtime.manifest import COMPLETE, read_manifest

Fault = tuple[str, str]  # a file of the build, and what is wrong with it
Claim = tuple[str, str, str]  # a claim, who or what proves it, and the result
UNSIGNED = "missing: not signed"  # what is wrong with a signature that is not there
NO_VERDICT = (LookupError, TypeError, ValueError, AttributeError, ShardmillError)  # raised if a file is not a verdict


@dataclass(frozen=True)
class VerificationReport:
    """The result of a verification."""

    audit: Audit  # of every byte
    rows: tuple[Claim, ...]
    wrong: tuple[Fault, ...]  # the audit's faults first


def prove(build: Path, keys: Sequence[PublicKey], cache: HashCache | None = None) -> VerificationReport:
    """Verify every file, statement and signature of a build.

    Signatures are not checked if no public key of a trusted signer is given. `audit` explains the cache.
    Raises ShardmillError if the build or its attestation is missing.
    """
    found = audit(build, cache)
    seal = f"{ATTESTATION}, {hash_file(build / ATTESTATION)[:16]}"
    rows = [(f"{found.checked} files", seal, _result(found.wrong, "as they were made"))]
    wrong = list(found.wrong)
    claims = [] if wrong else [_statements(build), _verdicts(build)]  # on damaged files these checks prove nothing
    for row, faults in (*claims, *_signatures(build, keys, found), _rebuilt(build, keys)):
        rows.append(row)
        wrong += faults
    return VerificationReport(found, tuple(rows), tuple(dict.fromkeys(wrong)))


def _result(faults: Sequence[Fault], fine: str) -> str:
    return f"{len(faults)} wrong" if faults else fine


def _statements(build: Path) -> tuple[Claim, list[Fault]]:
    """Check that provenance.json names every file, and that test-results.jsonl has a statement for every verdict."""
    statement = read_provenance(build / ATTESTATION)
    named = {(row["name"], row["digest"]["sha256"]) for row in statement["subject"]}
    made = (*manifest_files(read_manifest(build, COMPLETE), build / "model.json"), *verdict_hashes(steps_of(statement)))
    faults = [(ATTESTATION, f"{name} is not among its subjects") for name, sha in made if (name, sha) not in named]
    lines = (build / RESULTS).read_text(encoding="utf-8").splitlines() if (build / RESULTS).is_file() else []
    for path in _paths(build):
        try:
            expected = [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in gate_statements(build, [path])]
        except NO_VERDICT:
            expected = []
        if not expected or expected[0] not in lines:
            faults.append((RESULTS, f"has no statement that agrees with {path.relative_to(build).as_posix()}"))
    count = len(statement["subject"])
    return (f"{count} subjects", "model.json and the receipts", _result(faults, "none is missing")), faults


def _verdicts(build: Path) -> tuple[Claim, list[Fault]]:
    """Check the verdicts' numbers by this shardmill's own thresholds."""
    gates, numbers, faults = 0, 0, []
    for path in _paths(build):
        name = path.relative_to(build).as_posix()
        try:
            content = read_json(path)
            rows, known = content["gate"], thresholds_of(content)
            if not rows:
                faults.append((name, "a verdict without a number"))
            faults += [(name, fault) for fault in (_fault(row, known) for row in rows) if fault]
        except NO_VERDICT:
            rows, faults = [], [*faults, (name, "no verdict of a gate")]
        gates, numbers = gates + 1, numbers + len(rows)
    if not gates:
        faults.append((ATTESTATION, "names no verdict of any gate"))
    result = _result(faults, "within")
    return (f"{numbers} numbers of {gates} gates", "the thresholds of this shardmill", result), faults


def _fault(row: Mapping[str, Any], thresholds: Mapping[str, Threshold]) -> str:
    threshold, value = thresholds.get(str(row.get("name"))), row.get("value")
    if threshold is None:
        return f"{row.get('name')} is no number that this shardmill knows"
    if "limit_why" in row:  # the model's own limit counts only if it is stricter than the table's
        threshold = replace(threshold, limit=min(threshold.limit, _stated(row)))
    if not isinstance(value, int | float) or not math.isfinite(value) or not threshold.holds(value):
        return f"{row['name']} is {value}, must be {'>=' if threshold.at_least else '<='} {threshold.limit:g}"
    return "" if row.get("passed") is True else f"{row['name']} did not pass"


def _stated(row: Mapping[str, Any]) -> float:
    """Return the limit that a row names, or -inf, which no value keeps to, if the row does not name a limit."""
    try:
        return float(str(row["threshold"]).split()[-1])
    except (KeyError, IndexError, ValueError):
        return -math.inf


def _paths(build: Path) -> list[Path]:
    return [build / name for name, _ in sorted(verdict_hashes(steps_of(read_provenance(build / ATTESTATION))))]


def _signatures(build: Path, keys: Sequence[PublicKey], found: Audit) -> Iterator[tuple[Claim, list[Fault]]]:
    if not keys:
        there = [name for name in found.signatures if "rebuild-" not in name]
        yield ("statements and bundle", "nobody", "signed, not checked: give --key" if there else "not signed"), []
        return
    for envelopes, statements in STATEMENTS.items():
        told = [_check_envelopes(build, envelopes, statements, key) for key in keys]
        yield _signed(statements, keys, told, envelopes)
    yield _signed("the bundle", keys, [_check_bundle(build, key) for key in keys], SIGNATURE)
    if (build / CARD).is_file() and (build / SIGNATURE).is_file() and CARD not in _signed_files(build):
        yield ("the card", "nobody", f"not signed: {CARD} may say anything"), []


def _signed(what: str, keys: Sequence[PublicKey], told: Sequence[str], signature: str) -> tuple[Claim, list[Fault]]:
    """Return a row and its faults: the key that signed, or every key's objection."""
    by = next((key for key, fault in zip(keys, told, strict=True) if not fault), None)
    if by:
        return (what, f"key {by.short} ({by.file.name})", "signed"), []
    return (what, "nobody who is believed", "not proved"), [(signature, "; ".join(dict.fromkeys(told)))]


def _check_envelopes(build: Path, envelopes: str, statements: str, key: PublicKey) -> str:
    """Return why a key did not sign a file's statements, or an empty string if it did."""
    if not (build / envelopes).is_file():
        return UNSIGNED
    try:
        read = read_envelopes(build / envelopes)
        if [envelope.payload for envelope in read] != payloads(build, statements):
            return f"its payload is not {statements}"
        if not all(signers(envelope, [key]) for envelope in read):
            return f"not signed by {key.file}"
    except (ShardmillError, OSError) as error:
        return str(error).removeprefix(f"{build / envelopes}: ")
    return ""


def _check_bundle(build: Path, key: PublicKey) -> str:
    """Return why a key did not sign a bundle's files, or an empty string if it did."""
    if not (build / SIGNATURE).is_file():
        return UNSIGNED
    try:
        check_model(build, key.file)
        signed = signed_files(build)
        more = [name for name in bundle_files(build) if name not in signed and _is_to_be_signed(name)]
    except (ShardmillError, OSError) as error:
        return str(error).removeprefix(f"{build / SIGNATURE}: ")
    return f"does not cover {more[0]}" if more else ""


def _signed_files(build: Path) -> Collection[str]:
    """Return the files that the model signature names; empty if it can't be read, which another row reports."""
    try:
        return signed_files(build)
    except (ShardmillError, OSError):
        return ()


def _is_to_be_signed(name: str) -> bool:
    """Return whether the bundle's signature must cover a file; the card may be written after signing."""
    return not is_signature(name) and name not in (CARD_RECORD, CARD)


def _rebuilt(build: Path, keys: Sequence[PublicKey]) -> tuple[Claim, list[Fault]]:
    """Return how many keys signed a provenance statement about a build's subjects, the original builder's key first."""
    subjects = read_provenance(build / ATTESTATION)["subject"]
    believed: dict[str, PublicKey] = {}
    unchecked, wrong = 0, []
    for path in (build / PROVENANCE, *sorted((build / ATTESTATIONS).glob("rebuild-*"))):
        if not path.is_file():
            continue
        name = path.relative_to(build).as_posix()
        try:
            found = _who(path, subjects, keys) if keys else []
        except ShardmillError as error:
            wrong += [] if path == build / PROVENANCE else [(name, str(error).removeprefix(f"{path}: "))]
            continue
        unchecked += not found and path != build / PROVENANCE
        believed |= {key.short: key for key in found}
    by = f"keys {', '.join(believed)}" if believed else "nobody"
    more = f", {unchecked} not checked: whose key is not given" if unchecked else ""
    return ("the same bytes, built", by, f"by {len(believed)} independently{more}"), wrong


def _who(path: Path, subjects: list[object], keys: Sequence[PublicKey]) -> list[PublicKey]:
    """Return the keys that signed a statement about these subjects. Raises ShardmillError if it is about others."""
    (envelope, *others) = read_envelopes(path)
    try:
        statement = parse_json(envelope.payload)
        right = not others and statement["predicateType"] == PROVENANCE_TYPE and statement["subject"] == subjects
    except (ValueError, LookupError, TypeError) as error:
        raise ShardmillError(f"{path}: holds no statement ({error})") from error
    if not right:
        raise ShardmillError(f"{path}: is about other bytes than this build's")
    found = signers(envelope, keys)
    named = path.name.removeprefix("rebuild-").split(".")[0]
    if path.name.startswith("rebuild-") and found and all(key.short != named for key in found):
        raise ShardmillError(f"{path}: not the envelope of the key that its name says")
    return found
