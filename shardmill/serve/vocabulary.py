"""The bytes of single tokens. A token may contain part of a character, so its bytes don't follow from its text.

Two notations are in use: byte-level BPE writes each byte as a printable character (GPT-2's table), and tokenizers with
byte fallback write `<0xE2>` for a byte and U+2581 for a space.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardmill.files import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Map byte-level BPE's characters to bytes: printable Latin-1 to itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """A lookup of single tokens in a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = parse_json(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._tokenizer = tokenizer

    def bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of the token; empty if the tokenizer does not know the number."""
        if token in self._added:
            return self._added[token].encode()
        symbol = self._tokenizer.id_to_token(token)
        if symbol is None:
            return b""
        if self._alphabet is not None and all(c in self._alphabet for c in symbol):
            return bytes(self._alphabet[c] for c in symbol)
        byte = _BYTE.fullmatch(symbol)
        return bytes([int(byte[1], 16)]) if byte else symbol.replace(_SPACE, " ").encode()

    def text(self, token: int) -> str:
        """Return the token's text, with U+FFFD for bytes that are not whole characters."""
        return self.bytes(token).decode(errors="replace")
