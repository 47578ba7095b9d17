"""The reports of others' faults in docs/upstream.md: each script prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.witness import installed

PAGE = Path(__file__).parent.parent / "docs/upstream.md"
APPLES = pytest.mark.skipif(not installed.is_there(), reason="needs Apple's Core AI runtime, the extra coreai")
PROCESSORS = "## PyTorch 2.13.0: wrong products in bf16"  # seen on processors that compute in bf16 alone


def sections() -> dict[str, str]:
    """Return the reports by their titles."""
    return {title: text for title, text in re.findall(r"^(## [^\n]*)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=[APPLES] if title.startswith("## coreai") else [], id=title.removeprefix("## ")[:40])
        for title in sections()
        if not title.startswith(PROCESSORS)
    ],
)
def test_a_script_prints_what_the_page_says(title: str, tmp_path: Path) -> None:
    """A version without the fault would make the report, and what avoids the fault here, needless."""
    section = sections()[title]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "script.py").write_text(code)
    plain = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "PYTHONWARNINGS"))}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=plain, check=True, capture_output=True, text=True
    )
    ((_, first, more),) = re.findall(r"^It prints (```|`) ?(.*?) ?\1(?: and `(.*?)`)?\.?$", section, re.MULTILINE)
    said = [line for line in (first, more) if line]
    assert [line for line in done.stdout.splitlines() if line in said] == said, done.stdout


def test_every_report_has_a_script() -> None:
    assert len(sections()) == 7
    assert all(section.count("```python") == 1 for section in sections().values())
