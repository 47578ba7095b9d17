"""How commands write a number of bytes."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB")


def size(count: float) -> str:
    """Bytes as a person reads them, in powers of 1000."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {UNITS[unit]}"
