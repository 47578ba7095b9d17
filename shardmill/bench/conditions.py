"""The conditions of a measurement: the engine, the machine and the packages. Figures mean nothing without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmill import machine

PACKAGES = ("coremltools", "numpy", "shardmill", "torch")
Say = Callable[[str], None]  # receives lines about a benchmark's progress


def conditions(precision: str, threads: int | None) -> dict[str, Any]:
    """Return the conditions for speed.json.

    Args:
        precision: the portable engine's precision.
        threads: number of the portable engine's threads; None for Core ML, whose precision and threads are fixed.
    """
    computed = {"threads": threads, "precision": precision} if threads else {}
    return {
        "engine": machine.engine(),
        "machine": machine.machine() | computed,
        "versions": machine.package_versions(PACKAGES),
    }
