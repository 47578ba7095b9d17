"""Each script of the lab starts: what it imports is there, and `--help` says what it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parents[1]
# Modules that scripts and servers import.
PARTS = {"soak_memory.py", "soak_requests.py"}
SCRIPTS = sorted(file for file in LAB.glob("*.py") if file.name not in PARTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_it_says_what_it_takes(script: Path) -> None:
    command = [sys.executable, str(script), "--help"]
    done = subprocess.run(command, cwd=LAB.parent, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ") or "Usage: " in done.stdout


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_part_is_used(part: str) -> None:
    name = Path(part).stem
    assert any(f"import {name}" in text or f"from {name} " in text or f'"{part}"' in text for text in sources(part))


def sources(other: str) -> list[str]:
    return [file.read_text() for file in LAB.glob("*.py") if file.name != other]
