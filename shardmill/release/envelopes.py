"""DSSE envelopes (https://github.com/secure-systems-lab/dsse) around statements, by securesystemslib.

A file of envelopes holds one a line, spelled in one way, so that no bit of it means nothing. An envelope's payload is
the statement's own file, byte for byte, or a line of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import regular
from shardmill.attest.statement import PAYLOAD_TYPE
from shardmill.errors import ShardmillError
from shardmill.files import parse_json, write_text
from shardmill.release.extra import signing_libraries
from shardmill.release.keys import PublicKey

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import Signer  # type: ignore[attr-defined]


def write_envelopes(path: Path, payloads: Sequence[bytes], signer: Signer) -> None:
    """Signs each payload and writes the envelopes."""
    with signing_libraries():
        from securesystemslib.dsse import Envelope
    lines = []
    for payload in payloads:
        envelope = Envelope(payload, PAYLOAD_TYPE, {})
        envelope.sign(signer)
        lines.append(_spelled(envelope))
    write_text(path, "".join(lines))


def read_envelopes(path: Path) -> list[Envelope]:
    """The envelopes in a file. Raises ShardmillError where it is not spelled as they are written."""
    with signing_libraries():
        from securesystemslib.dsse import Envelope
    try:
        text = regular.read_bytes(path).decode()
        envelopes = [Envelope.from_dict(parse_json(line)) for line in text.splitlines()]
        whole = bool(envelopes) and "".join(map(_spelled, envelopes)) == text
    except Exception as error:  # whatever a stranger's file makes the library raise
        raise ShardmillError(f"{path}: no DSSE envelopes ({error}); sign again") from error
    if not whole or any(envelope.payload_type != PAYLOAD_TYPE for envelope in envelopes):
        raise ShardmillError(f"{path}: damaged: not what was written; sign again")
    return envelopes


def signers(envelope: Envelope, keys: Sequence[PublicKey]) -> list[PublicKey]:
    """Those of the keys that signed an envelope.

    Raises:
        ShardmillError: a signature that says it is of one of the keys is not.
    """
    from securesystemslib.exceptions import VerificationError

    named = [key for key in keys if key.key.keyid in envelope.signatures]
    for key in named:
        try:
            envelope.verify([key.key], 1)
        except VerificationError as error:
            raise ShardmillError(f"not signed by {key.file}, though it says so") from error
    return named


def _spelled(envelope: Envelope) -> str:
    content: dict[str, Any] = envelope.to_dict()
    return json.dumps(content, sort_keys=True) + "\n"
