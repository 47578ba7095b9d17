"""The OpenSSF model signature over a bundle (https://github.com/ossf/model-signing-spec), by its library."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardmill import regular
from shardmill.errors import ShardmillError
from shardmill.files import load_json, parse_json
from shardmill.release.extra import signing_libraries

SIGNATURE = "model.sig"


def sign_model(folder: Path, ignored: Iterable[str], key: Path) -> None:
    """Signs every file of a folder but those that are ignored; writes model.sig into it.

    Args:
        folder: the bundle.
        ignored: files and folders in it that are not signed.
        key: the private key's PEM file.
    """
    with signing_libraries():
        from model_signing import hashing, signing
    config: Any = signing.Config  # the library has no types
    hashed: Any = hashing.Config
    names = sorted(ignored)
    links = any(path.is_symlink() for name in names for path in (folder / name, *(folder / name).glob("**/*")))
    files = hashed().set_ignored_paths(paths=names).set_allow_symlinks(links)
    signature = folder / SIGNATURE
    scratch = folder / f".{SIGNATURE}"
    try:
        config().set_hashing_config(files).use_elliptic_key_signer(private_key=key).sign(folder, scratch)
        scratch.replace(signature)
    except ValueError as error:
        raise ShardmillError(f"{folder}: can't be signed ({error})") from error
    finally:
        scratch.unlink(missing_ok=True)


def signed_files(folder: Path) -> set[str]:
    """The names that a model signature speaks of; nothing says yet that it is sound. Raises ShardmillError."""
    try:
        bundle = load_json(folder / SIGNATURE)
        statement = parse_json(base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True))
        return {str(row["name"]) for row in statement["predicate"]["resources"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ShardmillError(f"{folder / SIGNATURE}: no model signature ({error}); sign again") from error


def check_model(folder: Path, key: Path) -> None:
    """Raises ShardmillError, naming the file, where a folder is not the one that the key signed."""
    with signing_libraries():
        from cryptography.exceptions import InvalidSignature
        from model_signing import verifying
        from sigstore_models.bundle.v1 import Bundle
    file = folder / SIGNATURE
    try:
        text = regular.read_text(file)
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
