"""Write the versions of constraints.txt into the files that repeat them.

    python tools/write_pins.py [--check]

constraints.txt is edited by hand; pyproject.toml says which packages are needed. This script writes the list of
envs/shardmill.yaml, and the linters' and type checker's versions in .pre-commit-config.yaml. With --check it writes
nothing, prints the files that differ and exits with 1. envs/shardmill.txt, which needs an index for its hashes, is
made by the command in its first lines.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LINTERS = {
    "ruff-pre-commit": "ruff",
    "snakemake/snakefmt": "snakefmt",
    "codespell-project/codespell": "codespell",
    "mirrors-mypy": "mypy",
}


def main() -> int:
    """Write the files, or compare them. Return the exit code."""
    texts = {"envs/shardmill.yaml": environment(), ".pre-commit-config.yaml": pre_commit()}
    differing = [name for name, text in texts.items() if (ROOT / name).read_text() != text]
    for name in differing:
        if "--check" in sys.argv:
            print(f"{name} does not have constraints.txt's versions; run: python tools/write_pins.py")
        else:
            (ROOT / name).write_text(texts[name])
            print(f"wrote {name}")
    return 1 if differing and "--check" in sys.argv else 0


def constraints() -> dict[str, str]:
    """Return the version of each package in constraints.txt, by normalised name."""
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#")
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def environment() -> str:
    """Return envs/shardmill.yaml with a line for each dependency of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = constraints()
    names = [Requirement(line).name for line in project["dependencies"]]
    head = (ROOT / "envs/shardmill.yaml").read_text().partition("  - pip:\n")[0]
    return head + "  - pip:\n" + "".join(f"      - {name}=={versions[canonicalize_name(name)]}\n" for name in names)


def pre_commit() -> str:
    """Return .pre-commit-config.yaml with the linters' revisions and the packages that mypy imports."""
    text, versions = (ROOT / ".pre-commit-config.yaml").read_text(), constraints()
    for address, name in LINTERS.items():
        text = re.sub(rf"({re.escape(address)}\n    rev: v).*", rf"\g<1>{versions[name]}", text)
    return re.sub(r"( {10}- )([\w.-]+)==.*", lambda m: f"{m[1]}{m[2]}=={versions[canonicalize_name(m[2])]}", text)


if __name__ == "__main__":
    sys.exit(main())
