"""What is proved of a build, and by whom: bytes by records, records by signatures, numbers by thresholds.

Every check names what is wrong; a check that could not be made says what it lacks, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.attest.statement import read_provenance
from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.pipeline.added import CARD_RECORD, is_signature
from shardmill.pipeline.audit import ATTESTATION, RESULTS, Audit, audit
from shardmill.release.bundle import CARD, bundle_files
from shardmill.release.claims import missing_statements, missing_subjects, verdict_faults
from shardmill.release.envelopes import read_envelopes, signers
from shardmill.release.keys import PublicKey
from shardmill.release.model_signature import SIGNATURE, check_model, signed_files
from shardmill.release.rebuilders import rebuilders
from shardmill.release.sign import STATEMENTS, payloads

Fault = tuple[str, str]  # a file of the build, and what is wrong with it


@dataclass(frozen=True)
class Row:
    """A line of the table: what is proved, by whom, and how far."""

    what: str
    by: str
    result: str


@dataclass(frozen=True)
class Proof:
    """What was found.

    Attributes:
        audit: of every byte.
        rows: the table.
        wrong: every fault, the audit's first.
    """

    audit: Audit
    rows: tuple[Row, ...]
    wrong: tuple[Fault, ...]


def prove(build: Path, keys: Sequence[PublicKey], cache: HashCache | None = None) -> Proof:
    """Looks at every file, statement and signature of a build.

    Args:
        build: the build's folder.
        keys: public keys of those who are believed; without one, signatures are not checked.
        cache: of hashes, see `audit`.

    Raises:
        ShardmillError: there is no build, or no attestation to start from.
    """
    found = audit(build, cache)
    rows = [Row(f"{found.checked} files", f"{ATTESTATION}, {hash_file(build / ATTESTATION)[:16]}", _count(found.wrong))]
    wrong = list(found.wrong)
    claims = [] if wrong else [_statements(build), _verdicts(build)]  # of damaged files they would say nothing
    for row, faults in (*claims, *_signatures(build, keys, found), _rebuilt(build, keys)):
        rows.append(row)
        wrong += faults
    return Proof(found, tuple(rows), tuple(dict.fromkeys(wrong)))


def _count(faults: Sequence[Fault]) -> str:
    return f"{len(faults)} wrong" if faults else "as they were made"


def _statements(build: Path) -> tuple[Row, list[Fault]]:
    faults = [(ATTESTATION, fault) for fault in missing_subjects(build)]
    faults += [(RESULTS, fault) for fault in missing_statements(build)]
    count = len(read_provenance(build / ATTESTATION)["subject"])
    return Row(
        f"{count} subjects", "model.json and the receipts", _count(faults) if faults else "none is missing"
    ), faults


def _verdicts(build: Path) -> tuple[Row, list[Fault]]:
    gates, numbers, faults = verdict_faults(build)
    return Row(f"{numbers} numbers of {gates} gates", "the thresholds of this shardmill", _result(faults)), faults


def _result(faults: Sequence[Fault]) -> str:
    return f"{len(faults)} wrong" if faults else "within"


def _signatures(build: Path, keys: Sequence[PublicKey], found: Audit) -> Iterator[tuple[Row, list[Fault]]]:
    if not keys:
        there = [name for name in found.signatures if "rebuild-" not in name]
        yield Row("statements and bundle", "nobody", "signed, not checked: give --key" if there else "not signed"), []
        return
    for envelopes, statements in STATEMENTS.items():
        yield _signed(
            statements, keys, [_check_envelopes(build, envelopes, statements, key) for key in keys], envelopes
        )
    yield _signed("the bundle", keys, [_check_bundle(build, key) for key in keys], SIGNATURE)
    if (build / CARD).is_file() and (build / SIGNATURE).is_file() and CARD not in _signed_files(build):
        yield Row("the card", "nobody", f"not signed: {CARD} may say anything"), []


def _signed(what: str, keys: Sequence[PublicKey], told: Sequence[str], signature: str) -> tuple[Row, list[Fault]]:
    """A row: signed by one of the keys, or what each of them says against it."""
    by = next((key for key, fault in zip(keys, told, strict=True) if not fault), None)
    if by:
        return Row(what, f"key {by.short} ({by.file.name})", "signed"), []
    return Row(what, "nobody who is believed", "not proved"), [(signature, "; ".join(dict.fromkeys(told)))]


def _check_envelopes(build: Path, envelopes: str, statements: str, key: PublicKey) -> str:
    """What keeps a key from having signed a file's statements; empty for nothing."""
    if not (build / envelopes).is_file():
        return "missing: not signed"
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
    """What keeps a key from having signed a bundle's files; empty for nothing."""
    if not (build / SIGNATURE).is_file():
        return "missing: not signed"
    try:
        check_model(build, key.file)
        signed = signed_files(build)
        more = [name for name in bundle_files(build) if name not in signed and _is_to_be_signed(name)]
    except (ShardmillError, OSError) as error:
        return str(error).removeprefix(f"{build / SIGNATURE}: ")
    return f"does not speak of {more[0]}" if more else ""


def _signed_files(build: Path) -> Collection[str]:
    """Those that the model signature names; none where it can't be read, of which its own row tells."""
    try:
        return signed_files(build)
    except (ShardmillError, OSError):
        return ()


def _is_to_be_signed(name: str) -> bool:
    """Whether a signature that lacks a file of the bundle is wrong; the card may come after it."""
    return not is_signature(name) and name not in (CARD_RECORD, CARD)


def _rebuilt(build: Path, keys: Sequence[PublicKey]) -> tuple[Row, list[Fault]]:
    found = rebuilders(build, keys)
    count = len(found.builders)
    by = ", ".join(key.short for key in found.builders) or "nobody"
    more = f", {found.unchecked} not checked: whose key is not given" if found.unchecked else ""
    return Row("the same bytes, built", f"keys {by}" if count else by, f"by {count} independently{more}"), found.wrong
