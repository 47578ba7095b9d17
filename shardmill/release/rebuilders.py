"""Statements of those who built the same bytes again.

A rebuilder's statement is SLSA provenance of a build of their own, with the same subjects, in an envelope that their
key signed. Whoever signed the build itself is no rebuilder of it, and a key counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.attest.statement import PROVENANCE as PROVENANCE_TYPE
from shardmill.attest.statement import read_provenance
from shardmill.errors import ShardmillError
from shardmill.files import parse_json
from shardmill.pipeline.audit import ATTESTATION
from shardmill.release.envelopes import read_envelopes, signers
from shardmill.release.keys import PublicKey
from shardmill.release.sign import ATTESTATIONS, PROVENANCE


@dataclass(frozen=True)
class Rebuilders:
    """Who built the same.

    Attributes:
        builders: keys of who built it, the first builder's first.
        unchecked: statements whose keys were not given.
        wrong: (file, what is wrong) of those that don't hold.
    """

    builders: tuple[PublicKey, ...]
    unchecked: int
    wrong: list[tuple[str, str]]


def rebuilders(build: Path, keys: Sequence[PublicKey]) -> Rebuilders:
    """Those of the keys whose holders built what a build's subjects are."""
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
    return Rebuilders(tuple(believed.values()), unchecked, wrong)


def _who(path: Path, subjects: list[object], keys: Sequence[PublicKey]) -> list[PublicKey]:
    """The keys that signed a statement about these subjects. Raises ShardmillError where it is about others."""
    (envelope, *others) = read_envelopes(path)
    try:
        statement = parse_json(envelope.payload)
        right = not others and statement["predicateType"] == PROVENANCE_TYPE and statement["subject"] == subjects
    except (ValueError, LookupError, TypeError) as error:
        raise ShardmillError(f"{path}: holds no statement ({error})") from error
    if not right:
        raise ShardmillError(f"{path}: speaks of other bytes than this build's")
    found = signers(envelope, keys)
    named = path.name.removeprefix("rebuild-").split(".")[0]
    if path.name.startswith("rebuild-") and found and all(key.short != named for key in found):
        raise ShardmillError(f"{path}: not the envelope of the key that its name says")
    return found
