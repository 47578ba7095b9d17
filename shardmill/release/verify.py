"""What a signed build proves: claims, signatures, and builders who got the same bytes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import parse_json, read_json
from shardmill.records.attest import PROVENANCE as PROVENANCE_TYPE
from shardmill.records.attest import read_provenance
from shardmill.records.audit import CARD_RECORD, Audit, audit, is_signature
from shardmill.records.finished import (
    ATTESTATION,
    RESULTS,
    Fault,
    Records,
    demand,
    gate_statements,
    manifest_files,
    read_records,
    record_faults,
    row_fault,
    step_faults,
    steps_of,
    verdict_faults,
    verdict_hashes,
)
from shardmill.release.bundle import CARD, bundle_files
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

Claim = tuple[str, str, str]  # a claim, who or what proves it, and the result
UNSIGNED = "missing: not signed"  # what is wrong with a signature that is not there
NO_RECORD = (LookupError, TypeError, ValueError, AttributeError, ShardmillError)  # raised if a file is none of ours


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
    audited = audit(build, cache)
    seal = f"{ATTESTATION}, {hash_file(build / ATTESTATION)[:16]}"
    rows = [(f"{audited.checked} files", seal, _result(audited.wrong, "as they were made"))]
    wrong = list(audited.wrong)
    claims = [] if wrong else _contents(build)  # on damaged files these checks prove nothing
    for row, faults in (*claims, *_signatures(build, keys, audited), _rebuilt(build, keys)):
        rows.append(row)
        wrong += faults
    return VerificationReport(audited, tuple(rows), tuple(dict.fromkeys(wrong)))


def _result(faults: Sequence[Fault], fine: str) -> str:
    return f"{len(faults)} wrong" if faults else fine


def _contents(build: Path) -> Iterator[tuple[Claim, list[Fault]]]:
    """Check what the records and the verdicts of a build say, whose files are as they were made."""
    statement = read_provenance(build / ATTESTATION)
    records: Records | None = None
    try:
        faults = list(step_faults(read_manifest(build, COMPLETE), statement))
        if not faults:
            records = read_records(build, statement)
            faults = list(record_faults(records))
    except NO_RECORD as error:
        told = error if isinstance(error, ShardmillError) else f"{type(error).__name__}: {error}"
        faults = [(ATTESTATION, f"no records of a build: {told}")]
    yield _statements(build, statement, faults)
    if records:
        yield _verdicts(build, records)


def _statements(build: Path, statement: Mapping[str, Any], known: Sequence[Fault]) -> tuple[Claim, list[Fault]]:
    """Check that provenance.json covers every file, and that test-results.jsonl has a statement for every verdict.

    `known` are the faults of the records.
    """
    named = {(row["name"], row["digest"]["sha256"]) for row in statement["subject"]}
    made = (*manifest_files(read_manifest(build, COMPLETE), build / "model.json"), *verdict_hashes(steps_of(statement)))
    unnamed = (name for name, sha in made if (name, sha) not in named)
    faults = [*known, *((ATTESTATION, f"{name} is not among its subjects") for name in unnamed)]
    lines = (build / RESULTS).read_text(encoding="utf-8").splitlines() if (build / RESULTS).is_file() else []
    for name, _ in sorted(verdict_hashes(steps_of(statement))):
        try:
            statements = gate_statements(build, [build / name])
            expected = [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in statements]
        except NO_RECORD:
            expected = []
        if not expected or expected[0] not in lines:
            faults.append((RESULTS, f"has no statement that agrees with {name}"))
    count = len(statement["subject"])
    return (f"{count} subjects", "model.json and the receipts", _result(faults, "none is missing")), faults


def _verdicts(build: Path, records: Records) -> tuple[Claim, list[Fault]]:
    """Check that every verdict has the numbers that it must have, within this shardmill's own thresholds."""
    gates, numbers, faults = 0, 0, list[Fault]()
    for name, _ in sorted(verdict_hashes(records.steps)):
        try:
            content = read_json(build / name)
            wanted = demand(records, name.removesuffix(".json"), content.get("findings", ()))
            rows = content["gate"]
            of_verdict = [*verdict_faults(content, wanted), *(row_fault(row, wanted.thresholds) for row in rows)]
        except NO_RECORD:
            rows, of_verdict = [], ["no verdict of a gate"]
        faults += [(name, fault) for fault in of_verdict if fault]
        gates, numbers = gates + 1, numbers + len(rows)
    if not gates:
        faults.append((ATTESTATION, "names no verdict of any gate"))
    result = _result(faults, "within")
    return (f"{numbers} numbers of {gates} gates", "the thresholds of this shardmill", result), faults


def _signatures(build: Path, keys: Sequence[PublicKey], audited: Audit) -> Iterator[tuple[Claim, list[Fault]]]:
    if not keys:
        signed = [name for name in audited.signatures if "rebuild-" not in name]
        yield ("statements and bundle", "nobody", "signed, not checked: give --key" if signed else "not signed"), []
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
            trusted = _who(path, subjects, keys) if keys else []
        except ShardmillError as error:
            wrong += [] if path == build / PROVENANCE else [(name, str(error).removeprefix(f"{path}: "))]
            continue
        unchecked += not trusted and path != build / PROVENANCE
        believed |= {key.short: key for key in trusted}
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
    trusted = signers(envelope, keys)
    named = path.name.removeprefix("rebuild-").split(".")[0]
    if path.name.startswith("rebuild-") and trusted and all(key.short != named for key in trusted):
        raise ShardmillError(f"{path}: not the envelope of the key that its name says")
    return trusted
