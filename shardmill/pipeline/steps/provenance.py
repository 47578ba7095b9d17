"""provenance: in-toto statements of a build: its inputs and tools as SLSA provenance, and the results of the gates.

The statements do not vary from run to run; unknown values are absent. docs/trust.md explains every field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packageurl import PackageURL

from shardmill import __version__
from shardmill.checkpoint.hashing import hash_file
from shardmill.checkpoint.paths import RECORD_FILE
from shardmill.files import dumps, read_json, read_sealed, write_json, write_text
from shardmill.models.eagle3 import FOLDER
from shardmill.pipeline.task import Task
from shardmill.records.attest import (
    ADAPTER,
    BASE,
    BUILD_TYPE,
    BUILDER,
    CALIBRATION_TEXT,
    PARITY_TEXT,
    PROVENANCE,
    RECIPE,
    interpreter,
    package_descriptors,
    parameters,
    resource_descriptor,
    statement,
    with_seal,
    workflow,
)
from shardmill.records.finished import check_verdicts, gate_statements, manifest_files, verdict_hashes
from shardmill.records.names import RECEIPT, SOURCE
from shardmill.runtime.manifest import COMPLETE, read_manifest


def task(
    record: Path,
    manifest: Path,
    receipts: list[Path],
    verdicts: list[Path],
    text: Path,
    calibration: list[Path],
    recipe: list[Path],
    settings: Mapping[str, Any],
    locks: Sequence[Mapping[str, str] | None],
) -> Task:
    """Describe provenance.json and test-results.jsonl.

    `recipe` is the file that the config's `convert.precision` names, if it names one. `locks` says of the model, and
    then of a drafter, from which lock the commit is.
    """

    def work(made: Mapping[str, Path]) -> None:
        lists = {PARITY_TEXT: [text], CALIBRATION_TEXT: calibration, RECIPE: recipe}
        named = {key: file for key, files in lists.items() for file in files}
        records = Records(record, manifest, receipts, verdicts, named, settings, locks)
        judged = [path.relative_to(manifest.parent).with_suffix("").as_posix() for path in verdicts]
        check_verdicts(read_manifest(manifest.parent, COMPLETE), bool(settings.get("witness")), judged)
        results = gate_statements(manifest.parent, verdicts)
        lines = [json.dumps(result, sort_keys=True, ensure_ascii=False) for result in results]
        write_text(made["results"], "".join(f"{line}\n" for line in lines))
        write_json(made["provenance"], provenance(records, made["results"]))

    return Task(work)


@dataclass(frozen=True)
class Records:
    """The files and settings behind a build's statements.

    Attributes:
        record: source.receipt.json, which has the same bytes as source/source.json.
        manifest: model.json.
        receipts: the receipts of all steps whose results are the same in every build.
        verdicts: the verdicts of the gates.
        named: files that the config names, by its keys: PARITY_TEXT, and CALIBRATION_TEXT and RECIPE if given.
        settings: the config as plain data.
        locks: of the model and of a drafter, the name of the lock that its commit is from, and the revision that was
            asked; None without a lock.
    """

    record: Path
    manifest: Path
    receipts: Sequence[Path]
    verdicts: Sequence[Path]
    named: Mapping[str, Path]
    settings: Mapping[str, Any]
    locks: Sequence[Mapping[str, str] | None] = ()


def provenance(records: Records, results: Path) -> dict[str, Any]:
    """Return provenance.json's content.

    Args:
        records: the files and settings behind the statement.
        results: the file of the gates' statements.

    Raises:
        ShardmillError: one of the files is damaged.
    """
    build = records.manifest.parent
    model = read_manifest(build, COMPLETE)
    names = {path: path.relative_to(build).as_posix() for path in records.receipts}
    steps = {names[path].removesuffix(RECEIPT): read_sealed(path) for path in records.receipts}
    byproducts = [
        (records.record.name, hash_file(records.record)),
        *_source_files(read_json(records.record)),
        (results.name, hash_file(results)),
        *((names[path], hash_file(path)) for path in records.receipts),
    ]
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"config": parameters(records.settings)},
            "internalParameters": {"steps": steps},
            "resolvedDependencies": [
                workflow(),
                *_checkpoint(read_json(records.record), records.locks),
                *(resource_descriptor(key, hash_file(file)) for key, file in records.named.items()),
                interpreter(),
                *package_descriptors({name for receipt in steps.values() for name in receipt.get("packages", {})}),
            ],
        },
        "runDetails": {
            "builder": {"id": BUILDER, "version": {"shardmill": __version__}},
            "byproducts": [resource_descriptor(name, sha) for name, sha in byproducts],
        },
    }
    return with_seal(
        statement(PROVENANCE, (*manifest_files(model, records.manifest), *verdict_hashes(steps)), predicate)
    )


def _source_files(source: Mapping[str, Any], folder: str = SOURCE) -> Iterator[tuple[str, str]]:
    """Yield (path, sha256) of the source.json in a checkpoint's folder, and in the folder of its drafter."""
    content = {key: value for key, value in source.items() if key != "drafter"}
    yield f"{folder}/{RECORD_FILE}", hashlib.sha256(dumps(content).encode()).hexdigest()
    if "drafter" in source:
        yield from _source_files(source["drafter"], f"{folder}/{FOLDER.rstrip('/')}")


def _checkpoint(
    source: Mapping[str, Any], locks: Sequence[Mapping[str, str] | None] = (), folder: str = SOURCE
) -> Iterator[dict[str, Any]]:
    """Yield what was fetched to a folder: the repository at its commit, where there is one, and every file."""
    lock, *others = locks or (None,)
    url = ""
    if source["repo"]:
        owner, name = source["repo"].split("/")
        url = str(PackageURL("huggingface", owner, name, source["commit"]))
        row = {"name": folder, "uri": url, "digest": {"gitCommit": source["commit"]}}
        yield row | ({"annotations": dict(lock)} if lock else {})
    merged = source.get("adapter", {"base": {}, "files": {}})
    base = merged["base"] | {name: file["sha256"] for name, file in source.get("completed", {}).items()}
    for name, file in source["files"].items():
        uri = {"uri": f"{url}#{name}"} if url and name not in base else {}
        yield resource_descriptor(f"{folder}/{name}", file["sha256"]) | uri
    for name, sha in base.items():
        yield resource_descriptor(f"{BASE}/{name}", sha) | ({"uri": f"{url}#{name}"} if url else {})
    for name, sha in merged["files"].items():
        yield resource_descriptor(f"{ADAPTER}/{name}", sha)
    if "drafter" in source:
        yield from _checkpoint(source["drafter"], others, f"{folder}/{FOLDER.rstrip('/')}")
