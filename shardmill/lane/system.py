"""Identity of this machine: chip, system, memory, and the measuring packages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def system_identity() -> dict[str, Any]:
    """Return the conditions of a measurement; a run continues only under equal ones."""
    return {
        "chip": _chip(),
        # Not platform.mac_ver: depending on the SDK of Python's build, it may call macOS 26 16.0.
        "system": _ask("sw_vers", "-productVersion") if sys.platform == "darwin" else platform.release(),
        "os": "macOS" if sys.platform == "darwin" else platform.system(),
        "build": _ask("sw_vers", "-buildVersion") if sys.platform == "darwin" else platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("coremltools", "numpy")},
    }


def _chip() -> str:
    if sys.platform == "darwin":
        return _ask("sysctl", "-n", "machdep.cpu.brand_string")
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _ask(*command: str) -> str:
    """Return the output of a macOS program. PATH may lack the folder of sysctl, as under sudo and in cron."""
    own = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/usr/sbin", "SYSTEM_VERSION_COMPAT": "0"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | own).stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
