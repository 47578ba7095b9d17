"""What figures were measured under: the engine, the machine and the packages, without which they say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmill import machine

PACKAGES = ("coremltools", "numpy", "shardmill", "torch")
Say = Callable[[str], None]  # takes lines that tell how far a benchmark is


def conditions(precision: str, threads: int | None) -> dict[str, Any]:
    """What speed.json says of them.

    Args:
        precision: the portable engine's.
        threads: with which the portable engine computed; none for Core ML, which has no choice of either.
    """
    computed = {"threads": threads, "precision": precision} if threads else {}
    return {
        "engine": machine.engine(),
        "machine": machine.machine() | computed,
        "versions": machine.package_versions(PACKAGES),
    }
