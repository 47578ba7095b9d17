"""The check whether a file of codes concerns a program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill.checkpoint.headers import read_header


def has_codes(file: Path, forms: Mapping[str, str]) -> bool:
    """Return whether a file has codes of a matrix in its chosen form; INT8, for example, never has codes."""
    real = file.resolve()  # a forecast of the work (`why`) passes a link
    names = {info.name for info in read_header(real.parent, real.name)}
    return any(f"{path}.{name}.codes" in names for path, name in forms.items())
