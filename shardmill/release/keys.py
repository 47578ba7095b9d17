"""Keys for signing: elliptic curves that DSSE's library and OpenSSF's model signatures both take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import regular
from shardmill.errors import ShardmillError
from shardmill.release.extra import signing_libraries

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey  # type: ignore[attr-defined]

CURVES = ("secp256r1", "secp384r1", "secp521r1")
HOW = "openssl ecparam -name prime256v1 -genkey -noout -out signing.key"
HOW_PUBLIC = "openssl ec -in signing.key -pubout -out signing.pub"


@dataclass(frozen=True)
class PublicKey:
    """Somebody's key.

    Attributes:
        file: where it lies.
        key: as the library of DSSE has it.
    """

    file: Path
    key: SSlibKey

    @property
    def short(self) -> str:
        """The key's identity as tables show it and files are named by it."""
        return str(self.key.keyid)[:16]


def read_private(file: Path) -> CryptoSigner:
    """A signer with the key in a PEM file. Raises ShardmillError where it is not one to sign with."""
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
    """The public key in a PEM file. Raises ShardmillError."""
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
        return regular.read_bytes(file)
    except OSError as error:
        raise ShardmillError(f"{file}: can't be read ({error.strerror}); give a key in PEM") from error


def _check_curve(file: Path, key: Any) -> None:
    if getattr(getattr(key, "curve", None), "name", "") not in CURVES:
        raise ShardmillError(f"{file}: not a key of one of the curves {', '.join(CURVES)}; `{HOW}` makes one")
