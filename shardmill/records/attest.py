"""Statements about a build that other tools can read: in-toto statements of SLSA provenance and of test results.

Strict parsers refuse unknown fields (https://in-toto.io/Statement/v1). So the digest that shows damage is stored among
the builder's internal parameters, where SLSA allows any field.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from importlib import metadata
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardmill
from shardmill import files
from shardmill.errors import UnreadableError
from shardmill.files import SEAL, digest, dumps, parse_json, read_json

HOME = "https://github.com/shardmill/shardmill"
PAGE = f"{HOME}/blob/main/docs/trust.md"
BUILD_TYPE = f"{PAGE}#build-type-v1"
BUILDER = f"{PAGE}#builder"


def _package_url(name: str, version: str) -> str:
    """Return pkg:pypi/NAME@VERSION."""
    return str(PackageURL("pypi", None, name, version))


COMMIT = re.compile(r"[0-9a-f]{40}")
COMMIT_FILE = "workflow/commit.txt"  # the build of a wheel writes it; see hatch_build.py


def workflow() -> dict[str, Any]:
    """Return a resource descriptor of the running code, without a commit if the commit is not known."""
    row: dict[str, Any] = {"name": "workflow", "uri": _package_url("shardmill", shardmill.__version__)}
    package = Path(shardmill.__file__).parent
    commit, modified = _of_clone(package.parent) or (_of_wheel(package), False)
    if COMMIT.fullmatch(commit):
        row |= {"uri": f"git+{HOME}@{commit}", "digest": {"gitCommit": commit}}
    if modified:
        row["annotations"] = {"modified": "files differ from the commit's"}
    return row


def _of_clone(folder: Path) -> tuple[str, bool] | None:
    """Return a clone's commit and whether its files differ from the commit; None if the folder is not a clone."""
    if not (folder / ".git").exists():
        return None
    try:
        return _git(folder, "rev-parse", "HEAD"), bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # no git here, or a clone of somebody else
        return None


def _git(folder: Path, *words: str) -> str:
    command = ("git", "-C", str(folder), *words)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _of_wheel(package: Path) -> str:
    file = package / COMMIT_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


# Dependencies that a config names, by its keys: the input of the parity gates, and the sources of forms and codes.
PARITY_TEXT, CALIBRATION_TEXT, RECIPE = "parity.text", "convert.calibration.text", "convert.precision"
BASE, ADAPTER = "base", "adapter"  # of dependencies: files before a merge or added tokens; the adapter that is merged
PATHS: tuple[tuple[str, ...], ...] = (  # keys of a config that name a file or a folder
    ("source", "path"),
    ("source", "adapter"),
    ("drafter", "path"),
    ("convert", "precision"),
    ("convert", "calibration", "text"),
    ("parity", "text"),
    ("benchmark", "text"),
    ("benchmark", "task_prompts"),
)


def parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole config without unset values.

    Paths that lead out of the project are cut to their last component.
    """
    chosen = _without_unset(settings)
    for *sections, key in PATHS:
        last = reduce(lambda outer, section: outer.get(section) or {}, sections, chosen)  # `benchmark` may be false
        if key in last:
            last[key] = _public(last[key])
    return chosen


def _without_unset(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_unset(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value is not None
    }


def _public(path: str) -> str:
    pure = PurePosixPath(path)
    outside = pure.is_absolute() or PurePath(path).is_absolute() or ".." in pure.parts or path.startswith("~")
    return pure.name if outside else path


STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def statement(kind: str, subjects: Iterable[tuple[str, str]], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement; `kind` is the predicate's type, and `subjects` are (path, sha256) of the described files."""
    rows = [resource_descriptor(name, sha) for name, sha in subjects]
    return {"_type": STATEMENT, "predicateType": kind, "subject": rows, "predicate": dict(predicate)}


def resource_descriptor(name: str, sha256: str) -> dict[str, Any]:
    """Return a resource descriptor of a file."""
    return {"name": name, "digest": {"sha256": sha256}}


def with_seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of SLSA provenance with the digest of its other content among its internal parameters."""
    made = deepcopy(dict(content))
    internal = made["predicate"]["buildDefinition"]["internalParameters"]
    internal.pop(SEAL, None)
    internal[SEAL] = digest(made)
    return made


def read_provenance(path: Path) -> dict[str, Any]:
    """Return SLSA provenance after a check of its seal.

    Raises:
        UnreadableError: a bit of the file has changed, or the file is not provenance.
    """
    content = read_json(path)
    try:
        whole = with_seal(content) == content and dumps(content).encode() == files.read_bytes(path)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise UnreadableError(f"{path}: can't be read (damaged: not what was written); remove it and build again")
    return dict(content)


def gate_statement(
    name: str, sha256: str, verdict: Mapping[str, Any], subjects: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return a statement about one gate's verdict.

    Args:
        name: the verdict's path in the build, without its ending: "parity/head_0".
        sha256: of the verdict's file.
        verdict: the verdict's content.
        subjects: (path, sha256) of the files that the gate judged.
    """
    rows = verdict["gate"]
    tests = {passed: [f"{name}.{row['name']}" for row in rows if row["passed"] is passed] for passed in (True, False)}
    notes: dict[str, Any] = {"evidence": verdict.get("evidence", "measured")}
    notes |= {key: verdict[key] for key in ("engine", "witness", "not_run") if verdict.get(key)}
    notes["thresholds"] = {row["name"]: row["threshold"] for row in rows}
    predicate: dict[str, Any] = {
        "result": "FAILED" if tests[False] else "PASSED",
        "configuration": [{"name": f"{name}.json", "digest": {"sha256": sha256}, "annotations": notes}],
        "passedTests": tests[True],
    }
    if tests[False]:
        predicate["failedTests"] = tests[False]
    return statement(TEST_RESULT, subjects, predicate)


# The Python packages that a build ran with, as package URLs (https://github.com/package-url/purl-spec).
OURS = ("shardmill", "portable-coreml")
SHA256 = re.compile(r"[0-9a-f]{64}")


def interpreter() -> dict[str, Any]:
    """Return the Python that ran."""
    name = platform.python_implementation().lower()
    return {"name": name, "uri": str(PackageURL("generic", None, name, platform.python_version()))}


def package_descriptors(deciding: Iterable[str]) -> list[dict[str, Any]]:
    """Return a resource descriptor of each package that is installed here and needed, by name.

    Packages whose versions decide bytes (`deciding`) are marked.
    """
    marked = {canonicalize_name(name) for name in deciding}
    rows = []
    for name in sorted(_needed({*marked, *OURS})):
        row: dict[str, Any] = {"name": name, "uri": _package_url(name, metadata.version(name))}
        sha256 = _wheel_hash(name)
        if sha256:
            row["digest"] = {"sha256": sha256}
        if name in marked:
            row["annotations"] = {"decides": "bytes"}
        rows.append(row)
    return rows


def versions(dependencies: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return versions by name of the Python packages among resolved dependencies."""
    urls = [PackageURL.from_string(row["uri"]) for row in dependencies if row.get("uri", "").startswith("pkg:pypi/")]
    return {url.name: str(url.version) for url in urls}


def installed(name: str) -> str:
    """Return a package's installed version; empty if the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _needed(roots: Iterable[str]) -> set[str]:
    """Return the installed packages among these packages and all their requirements."""
    needed: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in needed and installed(name):
            needed.add(name)
            waiting += _requirements(name)
    return needed


def _requirements(name: str) -> Iterator[str]:
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _wheel_hash(name: str) -> str:
    """Return sha256 of the archive that a package was installed from, if the installer recorded it (PEP 610)."""
    text = metadata.distribution(name).read_text("direct_url.json")
    try:
        sha256 = str(parse_json(text or "{}")["archive_info"]["hashes"]["sha256"])
    except (ValueError, LookupError, TypeError):
        return ""
    return sha256 if SHA256.fullmatch(sha256) else ""
