"""What this machine runs Core ML programs with: Apple's Core ML, or the portable engine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # how many threads libraries start with


def engine() -> dict[str, str]:
    """The engine's identity as receipts carry it: its name, and on a Mac the system's build and the chip."""
    if platform.system() != "Darwin":
        return {"name": "portable"}
    return {
        "name": "coreml",
        "macos": platform.mac_ver()[0],
        "build": _ask("sw_vers", "-buildVersion"),
        "chip": _ask("sysctl", "-n", "machdep.cpu.brand_string"),
    }


def is_portable() -> bool:
    """Whether programs run on the portable engine here."""
    return engine()["name"] == "portable"


@contextmanager
def load_programs_as(precision: str) -> Iterator[None]:
    """Programs loaded inside compute in "fp32" or "fp16". Core ML itself has no such choice, so there it is fp16."""
    import portable_coreml

    before = portable_coreml.precision()
    portable_coreml.install(precision=precision)
    try:
        yield
    finally:
        portable_coreml.install(precision=before)


def _ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def set_threads(count: int) -> None:
    """Threads of the portable engine; Core ML decides for itself."""
    import torch

    torch.set_num_threads(count)


def threads() -> int | None:
    """How many the portable engine computes with; None where Core ML decides."""
    import torch

    return torch.get_num_threads() if is_portable() else None


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions of packages, by name."""
    return {name: version(name) for name in sorted(names)}


def machine() -> dict[str, str | int]:
    """What a measured speed depends on; goes beside benchmark figures only."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
    }


def _processor() -> str:
    if platform.system() == "Darwin":
        return _ask("sysctl", "-n", "machdep.cpu.brand_string")
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else platform.processor()
