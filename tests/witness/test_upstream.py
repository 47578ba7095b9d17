"""The report of Core AI's fault in docs/upstream.md: its example prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.witness import installed

PAGE = Path(__file__).parents[2] / "docs/upstream.md"
pytestmark = pytest.mark.skipif(not installed.is_there(), reason="needs Apple's Core AI runtime, the extra coreai")


@pytest.mark.thorough
def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    """A version without the fault would make the page, and the work around the fault, needless."""
    section = PAGE.read_text().partition("## coreai-torch")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    file = tmp_path / "example.py"
    file.write_text(code[1])
    printed = subprocess.run([sys.executable, file], check=True, capture_output=True, text=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith("T = ")]
    assert lines == re.findall(r"`(T = \d: [^`]*)`", section)
    assert "is 0, should be 1" in lines[0]
