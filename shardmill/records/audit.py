"""Compares every file of a finished build with the hash in its record.

The audit starts from provenance.json, which names model.json, all files in this manifest, the checkpoint's files and
the receipts. The receipts name the outputs of the steps. Results that vary from run to run (the benchmark, the report)
or that only the report shows are not in provenance.json; separate receipts name them. A file that no record names is
as wrong as a file with other bytes, because programs that load a build may read any file in it. Only logs, Snakemake's
marks and what macOS, git, a hub and its client leave in folders are not checked.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import THREADS, hash_file
from shardmill.errors import ShardmillError, UnreadableError
from shardmill.evidence.folder import evidence_files
from shardmill.files import is_left_by_macos, read_sealed
from shardmill.records.attest import read_provenance
from shardmill.records.finished import ATTESTATION, attested, recorded_outputs
from shardmill.records.names import RECEIPT, SOURCE
from shardmill.runtime.adapters import recorded_files
from shardmill.runtime.manifest import COMPLETE, UNGATED, read_manifest

BUNDLE = "bundle.json"
CARD_RECORD = "attestations/card.json"
SIGNATURES = re.compile(r"model\.sig|attestations/(provenance|test-results|rebuild-[0-9a-f]{16})\.dsse\.jsonl")
STATES = ("reference.safetensors", "measured/original.safetensors")  # the original's, made again from the checkpoint
PROGRAMS = {"packages": "compiled/", "compiled": "packages/"}  # the folder left out, by the programs included


def added(build: Path) -> dict[str, Any]:
    """Return bundle.json's content.

    Without bundle.json, nothing was added. Raises ShardmillError if bundle.json is damaged.
    """
    nothing: dict[str, Any] = {"include": "both", "files": {}, "left_out": []}
    content = _record(build / BUNDLE) if (build / BUNDLE).exists() else nothing
    whole = isinstance(content.get("left_out"), list) and content.get("include") in ("both", *PROGRAMS)
    if not whole or not all(may_be_absent(str(name), content["include"]) for name in content["left_out"]):
        raise ShardmillError(f"{build / BUNDLE}: leaves out what must be there; remove it and sign or publish again")
    return content


def card(build: Path) -> dict[str, Any]:
    """Return attestations/card.json's content; without this file, the build has no card."""
    return _record(build / CARD_RECORD) if (build / CARD_RECORD).exists() else {"files": {}}


def _record(path: Path) -> dict[str, Any]:
    content = read_sealed(path)
    if not isinstance(content.get("files"), Mapping):
        raise ShardmillError(f"{path}: no record of added files; remove it and sign or publish again")
    return content


def is_signature(name: str) -> bool:
    """Return whether a path names a signature, which is checked with a key and not by its hash."""
    return SIGNATURES.fullmatch(name) is not None


def may_be_absent(name: str, include: str) -> bool:
    """Return whether a published build may lack a file that its records name."""
    weights = name.startswith(f"{SOURCE}/") and name.endswith(".safetensors")
    other = PROGRAMS.get(include)
    return weights or name in STATES or (other is not None and name.startswith(other))


UNATTESTED = ("report", "benchmark/speed")  # what the first names of the second was measured anew, and drawn since
SHOWN = "measured"  # a folder of results that only the report shows
LOGS = "logs"
HUB_CLIENT = ".cache/huggingface/"  # of `hf download --local-dir`
SNAKEMAKE_MARK = ".snakemake_timestamp"  # Snakemake puts this file into every folder that is a job's output


@dataclass(frozen=True)
class Audit:
    """What was found."""

    checked: int
    unchecked: int  # logs, Snakemake's own marks, and what others leave in folders
    wrong: tuple[tuple[str, str], ...]  # (path relative to the build, what is wrong), sorted
    signatures: tuple[str, ...] = ()  # files that only a key can check


@dataclass(frozen=True)
class Record:
    """The expected sha256 of a file, and the file that names it."""

    sha256: str
    named_by: str


def audit(build: Path, cache: HashCache | None = None) -> Audit:
    """Audit every file under a build. Raises ShardmillError if the build or its attestation is missing.

    Args:
        build: the build's folder.
        cache: hashes of files that did not change since they were hashed; without a cache, every byte is read.
    """
    if UNGATED in read_manifest(build, COMPLETE):
        raise ShardmillError(f"{build}: was taken with --ungated: its gates have not passed; build it, and name that")
    known = records(build)
    entries = dict(_build_entries(build))
    regular = [path for path, mode in entries.items() if stat.S_ISREG(mode)]
    unchecked = {path for path in regular if is_out_of_scope(path) or (path not in known and _is_left_by_others(path))}
    signatures = {path for path in regular if is_signature(path)}
    present = sorted(entries.keys() - unchecked - signatures)
    with ThreadPoolExecutor(THREADS) as pool:
        faults = dict(
            zip(present, pool.map(lambda path: fault(build, path, entries[path], known, cache), present), strict=True)
        )
    absent = set(added(build)["left_out"])
    missing = {path: "missing" for path in known if path not in absent and not _is_at_or_below(path, entries)}
    wrong = missing | {path: what for path, what in faults.items() if what}
    return Audit(len(present) + len(missing), len(unchecked), tuple(sorted(wrong.items())), tuple(sorted(signatures)))


def records(build: Path) -> dict[str, Record]:
    """Return every file that should be there, by its path relative to the build."""
    attestation = read_provenance(build / ATTESTATION)
    known = {ATTESTATION: Record(hash_file(build / ATTESTATION), ATTESTATION)}
    try:
        for path, sha in attested(attestation):
            known.setdefault(path, Record(sha, ATTESTATION))
    except (KeyError, TypeError, AttributeError) as error:
        raise ShardmillError(f"{build / ATTESTATION}: no attestation of a build; remove it and build again") from error
    shown = sorted(path.relative_to(build).as_posix() for path in (build / SHOWN).glob(f"[!.]*{RECEIPT}"))
    for name in (*UNATTESTED, *(path.removesuffix(RECEIPT) for path in shown)):
        receipt = f"{name}{RECEIPT}"
        if (build / receipt).exists():
            known[receipt] = Record(hash_file(build / receipt), receipt)
            for path, sha in recorded_outputs(name, read_sealed(build / receipt)):
                known.setdefault(path, Record(sha, receipt))
    for record, content in ((BUNDLE, added(build)), (CARD_RECORD, card(build))):
        if (build / record).exists():
            known[record] = Record(hash_file(build / record), record)
        for path, sha in content["files"].items():
            known.setdefault(path, Record(sha, record))
    for file in evidence_files(build):  # sealed when measured; no record names a changed file
        with suppress(UnreadableError):
            read_sealed(file)
            name = file.relative_to(build).as_posix()
            known[name] = Record(hash_file(file), name)
    for path, sha, receipt in recorded_files(build):
        known[path] = Record(sha, receipt)
    return known


def _build_entries(build: Path) -> Iterator[tuple[str, int]]:
    """Yield (path relative to the build, mode) of everything but folders; links are not followed."""
    for root, folders, names in os.walk(build, onerror=_raise_it):
        for name in (*names, *folders):
            path = Path(root, name)
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                yield path.relative_to(build).as_posix(), mode


def _raise_it(error: OSError) -> None:
    """Raise an error for a folder that can't be listed, so that it does not count as empty."""
    raise ShardmillError(f"{error.filename}: can't be listed ({error.strerror}); allow it and verify again") from error


def is_out_of_scope(path: str) -> bool:
    """Return whether a file is not about the model: a job's log, or a mark of Snakemake's."""
    return path.startswith(f"{LOGS}/") or PurePosixPath(path).name == SNAKEMAKE_MARK


def _is_left_by_others(path: str) -> bool:
    """Return whether macOS, git, a hub or its client put files of this name beside the files that they bring."""
    return is_left_by_macos(path) or path in (".gitattributes", ".git") or path.startswith((".git/", HUB_CLIENT))


def _is_at_or_below(path: str, entries: Mapping[str, int]) -> bool:
    """Return whether a path exists, or something else (a link, say) stands in place of one of its folders."""
    return path in entries or any(str(folder) in entries for folder in PurePosixPath(path).parents)


def fault(build: Path, path: str, mode: int, known: Mapping[str, Record], cache: HashCache | None = None) -> str:
    """Return the fault of the file at a path; "" if it has no fault."""
    record = known.get(path)
    fetched = path.startswith(f"{SOURCE}/") and record and stat.S_ISLNK(mode)  # a link if a hard link can't be made
    if not stat.S_ISREG(mode) and not (fetched and (build / path).is_file()):
        return "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
    if record is None:
        return "not a part of the build: no record names it"
    try:
        same = hash_file(build / path, cache) == record.sha256
    except (ShardmillError, OSError) as error:
        return f"can't be read ({error})"
    return "" if same else f"not the bytes that {record.named_by} names"
