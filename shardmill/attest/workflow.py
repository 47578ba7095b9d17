"""Which shardmill built: its version and, where it lies in a git clone or was installed with it, the commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import shardmill
from shardmill.attest.addresses import HOME
from shardmill.attest.packages import package_url

COMMIT = re.compile(r"[0-9a-f]{40}")
COMMIT_FILE = "workflow/commit.txt"  # the build of a wheel writes it; see hatch_build.py


def workflow() -> dict[str, Any]:
    """A resource descriptor of the code that runs; without a commit where none is known."""
    row: dict[str, Any] = {"name": "workflow", "uri": package_url("shardmill", shardmill.__version__)}
    package = Path(shardmill.__file__).parent
    commit, modified = _of_clone(package.parent) or (_of_wheel(package), False)
    if COMMIT.fullmatch(commit):
        row |= {"uri": f"git+{HOME}@{commit}", "digest": {"gitCommit": commit}}
    if modified:
        row["annotations"] = {"modified": "files differ from the commit's"}
    return row


def _of_clone(folder: Path) -> tuple[str, bool] | None:
    """The commit of a clone and whether its files are other than the commit's; None where there is no clone."""
    if not (folder / ".git").exists():
        return None
    try:
        return _git(folder, "rev-parse", "HEAD"), bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # no git here, or a clone of somebody else
        return None


def _git(folder: Path, *words: str) -> str:
    command = ("git", "-C", str(folder), *words)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _of_wheel(package: Path) -> str:
    file = package / COMMIT_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
