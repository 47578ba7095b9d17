"""Keys, signed builds, and verifiers of other makes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from patience import PATIENCE
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.release.sign import PublicKey, read_public


@dataclass(frozen=True)
class Keys:
    """A pair of keys in PEM files."""

    private: Path
    public: Path

    @property
    def known(self) -> PublicKey:
        return read_public(self.public)


def make_keys(folder: Path, name: str, curve: ec.EllipticCurve | None = None) -> Keys:
    private = ec.generate_private_key(curve or ec.SECP256R1())
    keys = Keys(folder / f"{name}.key", folder / f"{name}.pub")
    folder.mkdir(parents=True, exist_ok=True)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    keys.private.write_bytes(private.private_bytes(*form))
    public = private.public_key()
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    keys.public.write_bytes(public.public_bytes(serialization.Encoding.PEM, info))
    return keys


def run(*words: object) -> tuple[int, str]:
    """Exit code of a command of shardmill, and what a person reads."""
    said = CliRunner().invoke(app, [str(word) for word in words])
    return said.exit_code, said.output


def model_signing(build: Path, public: Path) -> subprocess.CompletedProcess[str]:
    """The model_signing command line's own verification, without shardmill."""
    command = [sys.executable, "-I", "-m", "model_signing", "verify", "key", str(build)]
    return subprocess.run(
        [*command, "--signature", str(build / "model.sig"), "--public_key", str(public)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


ALONE = """
import hashlib, json, sys
from pathlib import Path
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

build, key = Path(sys.argv[1]), SSlibKey.from_crypto(load_pem_public_key(Path(sys.argv[2]).read_bytes()))
kinds = {"provenance": Provenance, "test-results": TestResult}
counted = 0
for name, kind in kinds.items():
    for line in (build / f"attestations/{name}.dsse.jsonl").read_text().splitlines():
        envelope = Envelope.from_dict(json.loads(line))
        envelope.verify([key], 1)
        statement = json.loads(envelope.payload)
        parsed = json_format.ParseDict(statement, Statement([], "", {}).pb)
        Statement.copy_from_pb(parsed).validate()
        json_format.ParseDict(statement["predicate"], kind(), ignore_unknown_fields=False)
        for row in parsed.subject:
            found = hashlib.sha256((build / row.name).read_bytes()).hexdigest()
            assert found == row.digest["sha256"], row.name
            counted += 1
assert not any(module.startswith("shardmill") for module in sys.modules)
print(counted, "subjects")
"""


def in_toto_alone(build: Path, public: Path) -> subprocess.CompletedProcess[str]:
    """DSSE by securesystemslib and strict in-toto classes, in a process without shardmill, as in docs/releasing.md."""
    command = [sys.executable, "-I", "-c", ALONE, str(build), str(public)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
