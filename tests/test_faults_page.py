"""docs/faults.md counts the cases that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_its_counts_are_what_pytest_collects() -> None:
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    said: dict[str, int] = {}
    for row in (line for line in page.splitlines() if "](../tests/" in line):
        files, counts = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", row), re.findall(r"\d+", row.split("|")[4])
        said |= {file: int(count) for file, count in zip(files, counts, strict=True)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-m",
        "",
        "-qq",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *said,
    ]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    found = dict(re.findall(r"^(tests/[\w/]+\.py): (\d+)$", listed, re.MULTILINE))
    assert len(said) > 20 and {file: int(count) for file, count in found.items()} == said
