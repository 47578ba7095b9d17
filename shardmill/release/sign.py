"""Signs a build: its statements in DSSE envelopes, its bundle by an OpenSSF model signature."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import files as shardmill_files
from shardmill.errors import ShardmillError
from shardmill.files import load_json, parse_json, write_text
from shardmill.records.attest import PAYLOAD_TYPE
from shardmill.records.audit import CARD_RECORD, is_signature
from shardmill.records.finished import ATTESTATION, RESULTS
from shardmill.release.bundle import CARD, Include, assemble, bundle_files, remove_marks, signing_libraries, unsigned
from shardmill.release.publishable import License

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import (  # type: ignore[attr-defined]
        CryptoSigner,
        Signer,  # type: ignore[attr-defined]
        SSlibKey,
    )

SIGNATURE = "model.sig"
ATTESTATIONS = "attestations"
PROVENANCE = f"{ATTESTATIONS}/provenance.dsse.jsonl"
# Files of envelopes, each with the file of statements that the envelopes hold.
STATEMENTS = {PROVENANCE: ATTESTATION, f"{ATTESTATIONS}/test-results.dsse.jsonl": RESULTS}
CURVES = ("secp256r1", "secp384r1", "secp521r1")
HOW = "openssl ecparam -name prime256v1 -genkey -noout -out signing.key"
HOW_PUBLIC = "openssl ec -in signing.key -pubout -out signing.pub"


@dataclass(frozen=True)
class PublicKey:
    """A public key in a PEM file, and as an object of the DSSE library."""

    file: Path
    key: SSlibKey

    @property
    def short(self) -> str:
        """Return the key's short identity, which tables and file names show."""
        return str(self.key.keyid)[:16]


def read_private(file: Path) -> CryptoSigner:
    """Return a signer with the key in a PEM file. Raises ShardmillError if the key can't sign."""
    with signing_libraries():
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]
    try:
        private = load_pem_private_key(_read(file), None)
    except TypeError as error:
        raise ShardmillError(f"{file}: the key has a password; give one without") from error
    except ValueError as error:
        raise ShardmillError(f"{file}: no private key in PEM; `{HOW}` makes one") from error
    _check_curve(file, private)
    return CryptoSigner(private)


def read_public(file: Path) -> PublicKey:
    """Return the public key in a PEM file. Raises ShardmillError."""
    with signing_libraries():
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
        from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]
    try:
        public = load_pem_public_key(_read(file))
    except ValueError as error:
        raise ShardmillError(f"{file}: no public key in PEM; `{HOW_PUBLIC}` makes one of a private key") from error
    _check_curve(file, public)
    return PublicKey(file, SSlibKey.from_crypto(public))


def _read(file: Path) -> bytes:
    try:
        return shardmill_files.read_bytes(file)
    except OSError as error:
        raise ShardmillError(f"{file}: can't be read ({error.strerror}); give a key in PEM") from error


def _check_curve(file: Path, key: Any) -> None:
    if getattr(getattr(key, "curve", None), "name", "") not in CURVES:
        raise ShardmillError(f"{file}: not a key of one of the curves {', '.join(CURVES)}; `{HOW}` makes one")


def write_envelopes(path: Path, payloads: Sequence[bytes], signer: Signer) -> None:
    """Sign each payload and write the envelopes."""
    with signing_libraries():
        from securesystemslib.dsse import Envelope
    lines = []
    for payload in payloads:
        envelope = Envelope(payload, PAYLOAD_TYPE, {})
        envelope.sign(signer)
        lines.append(_spelled(envelope))
    write_text(path, "".join(lines))


def read_envelopes(path: Path) -> list[Envelope]:
    """Return the envelopes in a file. Raises ShardmillError if their form is not shardmill's."""
    with signing_libraries():
        from securesystemslib.dsse import Envelope
    try:
        text = shardmill_files.read_bytes(path).decode()
        envelopes = [Envelope.from_dict(parse_json(line)) for line in text.splitlines()]
        whole = bool(envelopes) and "".join(map(_spelled, envelopes)) == text
    except Exception as error:  # whatever a stranger's file makes the library raise
        raise ShardmillError(f"{path}: no DSSE envelopes ({error}); sign again") from error
    if not whole or any(envelope.payload_type != PAYLOAD_TYPE for envelope in envelopes):
        raise ShardmillError(f"{path}: damaged: not what was written; sign again")
    return envelopes


def signers(envelope: Envelope, keys: Sequence[PublicKey]) -> list[PublicKey]:
    """Return the given keys that signed an envelope.

    Raises:
        ShardmillError: a signature names a given key, but the key did not make the signature.
    """
    from securesystemslib.exceptions import VerificationError

    named = [key for key in keys if key.key.keyid in envelope.signatures]
    for key in named:
        try:
            envelope.verify([key.key], 1)
        except VerificationError as error:
            raise ShardmillError(f"names {key.file} as its signer, but that key did not sign it") from error
    return named


def _spelled(envelope: Envelope) -> str:
    content: dict[str, Any] = envelope.to_dict()
    return json.dumps(content, sort_keys=True) + "\n"


def signed_files(folder: Path) -> set[str]:
    """Return the files that a model signature names; the signature is not verified. Raises ShardmillError."""
    try:
        bundle = load_json(folder / SIGNATURE)
        statement = parse_json(base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True))
        return {str(row["name"]) for row in statement["predicate"]["resources"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ShardmillError(f"{folder / SIGNATURE}: no model signature ({error}); sign again") from error


def check_model(folder: Path, key: Path) -> None:
    """Raise ShardmillError, naming the file, if a folder is not the folder that the key signed."""
    with signing_libraries():
        from cryptography.exceptions import InvalidSignature
        from model_signing import verifying
        from sigstore_models.bundle.v1 import Bundle
    file = folder / SIGNATURE
    try:
        text = shardmill_files.read_text(file)
        if Bundle.from_dict(parse_json(text)).to_json() != text:
            raise ShardmillError(f"{file}: damaged: not what was written; sign again")
        config: Any = verifying.Config  # the library has no types
        verifier = config().use_elliptic_key_verifier(public_key=key)
        verifier.set_ignore_unsigned_files(True).verify(folder, file)
    except InvalidSignature as error:
        raise ShardmillError(f"{file}: not signed by {key}") from error
    except ShardmillError:
        raise
    except Exception as error:  # whatever a stranger's file makes the library raise
        raise ShardmillError(f"{file}: {error}") from error


def sign_build(build: Path, key: Path, include: Include = "both", license: License | None = None) -> list[str]:
    """Sign a build as it is, and return the names of the files that were written; see `assemble`.

    Raises ShardmillError if the key can't sign, or if a file of the build is not as it was made.
    """
    signer = read_private(key)
    assemble(build, include, license)
    for envelopes, statements in STATEMENTS.items():
        write_envelopes(build / envelopes, payloads(build, statements), signer)
    remove_marks(build)
    sign_bundle(build, key)
    return [*STATEMENTS, SIGNATURE]


def sign_bundle(build: Path, key: Path) -> None:
    """Write model.sig for every file of the bundle except signatures; the card is included if it exists."""
    with signing_libraries():
        from model_signing import hashing, signing
    build = build.resolve()  # the library takes no link to a folder
    config: Any = signing.Config  # the library has no types
    hashed: Any = hashing.Config
    files = [name for name in bundle_files(build) if not is_signature(name) and name != CARD_RECORD]
    ignored = sorted(unsigned(build, files) | {SIGNATURE, ATTESTATIONS, *({CARD} - set(files))})
    links = any(path.is_symlink() for name in ignored for path in (build / name, *(build / name).glob("**/*")))
    hashes = hashed().set_ignored_paths(paths=ignored).set_allow_symlinks(links)
    scratch = build / f".{SIGNATURE}"
    try:
        config().set_hashing_config(hashes).use_elliptic_key_signer(private_key=key).sign(build, scratch)
        scratch.replace(build / SIGNATURE)
    except ValueError as error:
        raise ShardmillError(f"{build}: can't be signed ({error})") from error
    finally:
        scratch.unlink(missing_ok=True)


def payloads(build: Path, name: str) -> list[bytes]:
    """Return the payloads to sign in a file of statements: the whole file, or each line of a .jsonl file."""
    content = (build / name).read_bytes()
    return content.splitlines() if name.endswith(".jsonl") else [content]
