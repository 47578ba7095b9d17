"""Which Core AI runtime is installed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

from shardmill.errors import ShardmillError

PACKAGES = {"coreai": "coreai-core", "coreai_torch": "coreai-torch"}  # module -> distribution
MISSING = (
    "Apple's Core AI runtime is not installed: in a clone, pip install -c constraints.txt -e '.[coreai]' "
    "(Linux x86_64 with glibc 2.34 or newer, or macOS 26 or newer on Apple silicon)"
)


def is_there() -> bool:
    """Return whether the runtime and its converter are installed."""
    return all(find_spec(module) for module in PACKAGES)


def runtime() -> dict[str, str]:
    """Return what decides the runtime's numbers: the packages' versions and the processor's architecture.

    Raises:
        ShardmillError: if it is not installed.
    """
    if not is_there():
        raise ShardmillError(MISSING)
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES.values())
    return {"name": "coreai", "version": versions, "machine": platform.machine()}


def check_runtime(expected: Mapping[str, str]) -> None:
    """Raise ShardmillError if this job has no Core AI runtime, or another one than the run that started the job."""
    if (here := runtime()) != dict(expected):
        told = "; ".join(" on ".join((each["version"], each["machine"])) for each in (expected, here))
        raise ShardmillError(f"the jobs of one build need one Core AI runtime, but the run and this job have {told}")
