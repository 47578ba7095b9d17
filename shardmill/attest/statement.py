"""in-toto statements (https://in-toto.io/Statement/v1): their frame, and how damage to one shows.

Strict parsers refuse fields that they do not know, so the digest by which damage shows stands where SLSA leaves room
for a builder's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardmill import regular
from shardmill.errors import UnreadableError
from shardmill.files import SEAL, digest, dumps, read_json

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def statement(kind: str, subjects: Iterable[tuple[str, str]], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """A statement.

    Args:
        kind: the predicate's type.
        subjects: (path, sha256) of what it speaks of.
        predicate: what it says.
    """
    rows = [described(name, sha) for name, sha in subjects]
    return {"_type": STATEMENT, "predicateType": kind, "subject": rows, "predicate": dict(predicate)}


def described(name: str, sha256: str) -> dict[str, Any]:
    """A resource descriptor of a file."""
    return {"name": name, "digest": {"sha256": sha256}}


def with_seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """SLSA provenance with the digest of all else in it among its internal parameters."""
    predicate = content["predicate"]
    definition = predicate["buildDefinition"]
    internal = {key: value for key, value in definition["internalParameters"].items() if key != SEAL}

    def having(parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **content,
            "predicate": {**predicate, "buildDefinition": {**definition, "internalParameters": parameters}},
        }

    return having({**internal, SEAL: digest(having(internal))})


def read_provenance(path: Path) -> dict[str, Any]:
    """SLSA provenance that was written with its seal.

    Raises:
        UnreadableError: a single bit of it is another, or it is something else.
    """
    content = read_json(path)
    try:
        whole = with_seal(content) == content and dumps(content).encode() == regular.read_bytes(path)
    except (ValueError, LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UnreadableError(f"{path}: can't be read (damaged: not what was written); remove it and build again")
    return dict(content)
