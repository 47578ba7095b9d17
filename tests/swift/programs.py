"""The Swift package's program, built once, and the scripts beside it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import succeeded

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "swift" / "scripts"
SWIFT = "SHARDMILL_SWIFT"  # a folder with `swift` and `swift-exec`, as .ci/install-swift writes them


def script(name: str) -> Any:
    """Return a script of the Swift package as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def check_command() -> list[str] | None:
    """Build shardmill-check in release and return the command that runs it; None if there is no Swift."""
    folder = os.environ.get(SWIFT)
    swift = str(Path(folder, "swift").resolve()) if folder else shutil.which("swift")
    if swift is None:
        return None
    build = [swift, "build", "-c", "release", "--product", "shardmill-check"]
    done = subprocess.run(build, cwd=ROOT, check=False, capture_output=True, text=True)
    succeeded(done)
    program = str(ROOT / ".build" / "release" / "shardmill-check")
    return [str(Path(folder, "swift-exec").resolve()), program] if folder else [program]


def demand_check() -> list[str]:
    """Return the command that runs shardmill-check, or skip the test."""
    command = check_command()
    if command is None:
        pytest.skip(f"there is no swift: install it, or set {SWIFT} (.ci/install-swift)")
    return command
