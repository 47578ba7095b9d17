"""measure.py as a person runs it: an unpacked kit, measure.py in a process that has nothing of shardmill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from processes import succeeded

HERE = Path(__file__).parent
PORTABLE = HERE.parents[1] / "portable"
NOBODY = """
import sys

class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "shardmill":
            raise ImportError("shardmill is not to be had here")

sys.meta_path.insert(0, Nobody())
"""  # a sitecustomize.py: it holds for measure.py and for all its children, whatever is installed
LEAP = """
import os, select
from pathlib import Path

wait, hangs = select.select, Path(os.environ.get("KIT", ""), "hangs")

def leap(reading, writing, failing, timeout):
    while True:
        ready = wait(reading, writing, failing, min(timeout, 0.02))
        if any(ready):
            return ready
        if hangs.exists():
            hangs.unlink()
            return ready

if os.environ.get("FAULT", "").startswith("hang"):
    select.select = leap
"""  # to it, where an engine hangs: no limit in seconds passes until a child says so, and then it has passed


def unpacked(kit: Path, folder: Path) -> Path:
    """The kit's folder; beside it what keeps shardmill away."""
    with zipfile.ZipFile(kit) as archive:
        archive.extractall(folder)
    (folder / "away").mkdir()
    (folder / "away/sitecustomize.py").write_text(NOBODY + LEAP)
    return folder / "shardmill-kit"


def environment(kit: Path, *folders: Path, **more: str) -> dict[str, str]:
    """With these folders to import from, and no shardmill."""
    path = os.pathsep.join(map(str, (kit.parent / "away", *folders)))
    return {**os.environ, "PYTHONPATH": path, "KIT": str(kit), **more}


def command(kit: Path, *options: str) -> list[str]:
    """measure.py with an engine that needs no torch."""
    return [sys.executable, str(kit / "measure.py"), "--engine", "fake_engine", "--passes", "2", *options]


def measured(kit: Path, *options: str, **more: str) -> dict[str, Any]:
    """A whole run with the fake engine: result.json."""
    done = subprocess.run(
        command(kit, *options), check=False, env=environment(kit, HERE / "fake", **more), capture_output=True, text=True
    )
    succeeded(done)
    return result(kit)


def result(kit: Path) -> dict[str, Any]:
    """What a run has left."""
    found: dict[str, Any] = json.loads((kit / "result.json").read_text())
    return found


def lines(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The measurements of a result of one variant."""
    (variant,) = result["variants"].values()
    found: dict[str, dict[str, Any]] = variant["measurements"]
    return found


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    """What another run gives again."""
    return {key: {k: v for k, v in line.items() if k != "timing"} for key, line in lines(result).items()}
