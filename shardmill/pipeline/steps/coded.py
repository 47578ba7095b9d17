"""Which programs a file of codes says something of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill.checkpoint.headers import read_header


def has_codes(file: Path, forms: Mapping[str, str]) -> bool:
    """Return whether a file has codes of a matrix in the form that it is to have; INT8 for one is always rounded."""
    real = file.resolve()  # whoever foresees what is to be done looks at a link to it
    held = {info.name for info in read_header(real.parent, real.name)}
    return any(f"{path}.{name}.codes" in held for path, name in forms.items())
