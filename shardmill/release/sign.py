"""Signs a build: its statements in DSSE envelopes, its bundle by an OpenSSF model signature."""

from __future__ import annotations

from pathlib import Path

from shardmill.pipeline.added import CARD_RECORD, is_signature
from shardmill.pipeline.audit import ATTESTATION, RESULTS
from shardmill.release.bundle import CARD, Include, assemble, bundle_files, remove_marks, unsigned
from shardmill.release.envelopes import write_envelopes
from shardmill.release.keys import read_private
from shardmill.release.license import License
from shardmill.release.model_signature import SIGNATURE, sign_model

ATTESTATIONS = "attestations"
PROVENANCE = f"{ATTESTATIONS}/provenance.dsse.jsonl"
# Envelopes, and the file that they hold.
STATEMENTS = {PROVENANCE: ATTESTATION, f"{ATTESTATIONS}/test-results.dsse.jsonl": RESULTS}


def sign(build: Path, key: Path, include: Include = "both", license: License | None = None) -> list[str]:
    """Signs a build as it is and returns the names of the files that were written.

    Args:
        build: the build's folder.
        key: the private key's PEM file.
        include: which programs the bundle has.
        license: the checkpoint's, where it is known.

    Raises:
        ShardmillError: the key is none to sign with, or a file of the build is not as it was made.
    """
    signer = read_private(key)
    assemble(build, include, license)
    for envelopes, statements in STATEMENTS.items():
        write_envelopes(build / envelopes, payloads(build, statements), signer)
    remove_marks(build)
    sign_bundle(build, key)
    return [*STATEMENTS, SIGNATURE]


def sign_bundle(build: Path, key: Path) -> None:
    """Writes model.sig for all of the bundle but signatures; the card is signed once there is one."""
    files = [name for name in bundle_files(build) if not is_signature(name) and name != CARD_RECORD]
    sign_model(build, unsigned(build, files) | {SIGNATURE, ATTESTATIONS, *({CARD} - set(files))}, key)


def payloads(build: Path, name: str) -> list[bytes]:
    """What is signed of a file of statements: all of it, or each of its lines."""
    content = (build / name).read_bytes()
    return content.splitlines() if name.endswith(".jsonl") else [content]
