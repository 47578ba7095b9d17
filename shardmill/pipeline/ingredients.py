"""In which ingredients of their keys two actions differ, so that a log can say why there is work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the leaves in which two actions differ."""
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name}")
    return found
