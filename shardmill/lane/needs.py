"""Checks whether this Python can measure, before anything is imported that may be missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

CORE_ML_TOOLS = "9.0"
NATIVE = "coremltools.libcoremlpython"
HOW = "python3.12 -m venv .venv && .venv/bin/pip install coremltools==9.0 numpy && .venv/bin/python measure.py"
PATIENCE = 600.0  # seconds that the first import of coremltools may take


def lacking(script: Path, engine: str | None) -> str:
    """Return in one line why this Python can't measure, and the remedy; "" if it can.

    Args:
        script: measure.py.
        engine: module that takes Core ML's place, or None.
    """
    why = _why(engine)
    if not why:
        return ""
    python = script.parent / ".venv/bin/python"
    other = python.is_file() and Path(sys.prefix).resolve() != python.parents[1].resolve()
    return f"{sys.executable}: {why}; {f'use {python} {script.name}' if other else HOW}"


def _why(engine: str | None) -> str:
    """Return what is missing or does not work."""
    try:
        found = version("coremltools")
    except PackageNotFoundError:
        found = ""
    for name in ("numpy", "coremltools"):
        if find_spec(name) is None:
            return f"{name} is not installed for this Python {sys.version.split()[0]}"
    if found.split(".")[:1] != CORE_ML_TOOLS.split(".")[:1]:
        return f"coremltools is {found or 'of no known version'}, and {CORE_ML_TOOLS} is needed"
    wanted = engine or NATIVE  # in a separate process, since importing a native module may end the process
    tried = subprocess.run(
        [sys.executable, "-c", f"import {wanted}"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
        return f"{wanted} can't be imported ({said[-1]})"
    return ""
