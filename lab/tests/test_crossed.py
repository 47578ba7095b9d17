"""The tracer counts files in which a function runs, in every process, and no import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CROSSED = Path(__file__).parents[1] / "crossed.py"
MODULES = {
    "main": "import os, subprocess, sys, threading, imported, called\ncalled.work()\n"
    "threading.Thread(target=__import__('threaded').work).start()\n"
    "subprocess.run([sys.executable, '-c', 'import child; child.work()'], check=True)\n",
    "imported": "def decorated(f):\n    return f\n@decorated\ndef work(): pass\nclass Kind: pass\n",
    "called": "import tables\ndef work(): return tables.ROW\n",
    "tables": "def row(): return 1\nROW = row()\n",
    "threaded": "def work(): pass\n",
    "child": "def work(): open('now', 'w').close(); later()\ndef later(): pass\n",
}


@pytest.mark.parametrize(
    ("options", "words", "files"),
    [
        ([], [], ["called.py", "child.py", "threaded.py"]),
        ([], ["import child"], ["child.py"]),
        (["--while", "now"], [], ["child.py"]),
    ],
    ids=["all processes", "one process", "while a file is there"],
)
def test_files_with_running_functions_count(
    options: list[str], words: list[str], files: list[str], tmp_path: Path
) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    run = [sys.executable, CROSSED, "run", "--root", tmp_path, *options, "out", sys.executable, "main.py"]
    subprocess.run(run, cwd=tmp_path, check=True)
    count = [sys.executable, CROSSED, "count", "out", *words]
    said = subprocess.run(count, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == [*files, f"{len(files)} file{'s' * (len(files) > 1)}"]
