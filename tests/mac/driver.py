"""Start processes on the simulated Mac, and reads what they logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LINUX_ONLY = pytest.mark.skipif(sys.platform == "darwin", reason="the simulated Mac needs Linux around it")


def run(*command: str, log: Path | None = None, **switches: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script or `-c CODE` on the simulated Mac, in this repository.

    Args:
        command: the arguments of Python.
        log: MAC_LOG.
        switches: further environment variables.
    """
    paths = (ROOT, ROOT / "decoding", ROOT / "kit", ROOT / "portable", HERE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAC_")}
    environment |= {"PYTHONPATH": ":".join(map(str, paths)), **switches, **({"MAC_LOG": str(log)} if log else {})}
    return subprocess.run(
        [str(HERE / "run"), sys.executable, *command],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def events(log: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in a log, in order."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [row for row in map(json.loads, lines) if row["event"] == kind]
