"""The package on its own: its wheel, in a process that has nothing else of this repository, runs its README."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
ALONE = """
import sys

sys.path = [path for path in sys.path if "site-packages" in path or "lib/python" in path]
sys.path = [sys.argv[1], *sys.path]
{example}
ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("shardmill", "portable_coreml", "kit_runner"))
print(sys.modules["drafted_decoding"].__file__, *ours)
"""


@pytest.mark.thorough
def test_its_wheel_runs_the_readme_without_the_rest(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    build += ["--no-build-isolation"] if find_spec("hatchling") else []
    subprocess.run([*build, str(PROJECT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("drafted_decoding-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (example,) = re.findall(r"^```python\n(.*?)^```$", (PROJECT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    code = ALONE.format(example=example)
    command = [sys.executable, "-c", code, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = re.search(r"# (\(.*)$", example, re.MULTILINE)
    assert said is not None
    first, last = done.stdout.splitlines()
    assert first == said[1] and last == str(tmp_path / "site/drafted_decoding/__init__.py")
