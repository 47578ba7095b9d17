"""Resolve every extra of pyproject.toml on each Python and system that README names, and install nothing.

    python tools/resolve_extras.py

uv takes the versions of constraints.txt from the index that pip uses. Where a page says that an extra can't be
installed, it must be refused for the reason that the page gives. The exit code is 1 if an answer is another one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [f"3.{minor}" for minor in range(100) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])]
# The oldest system of each kind that README names, and a newer one: uv's name of the platform, and macOS's version.
SYSTEMS = {
    "Linux with glibc 2.28": ("x86_64-manylinux_2_28", ""),
    "Linux with glibc 2.36": ("x86_64-manylinux_2_36", ""),
    "macOS 15": ("aarch64-apple-darwin", "15.0"),
    "macOS 26": ("aarch64-apple-darwin", "26.0"),
}
# docs/witness.md says so: coreai-core has wheels from glibc 2.34 and macOS 26 on.
REFUSED = {("coreai", "Linux with glibc 2.28"), ("coreai", "macOS 15")}
REASON = re.compile("Because coreai-core.* has no wheels with a matching platform tag")
BUILT = "connection-pool"  # the only package without a wheel; it is one of plain Python, so no compiler is needed
# What PyTorch's wheels on PyPI ask for on Linux. PyTorch pins them, and the CPU wheels do without.
CUDA = ("cuda-", "nvidia-", "triton")


@dataclass(frozen=True)
class Answer:
    """What uv says of some extras: the version of each package, or why there is none."""

    packages: Mapping[str, str]
    reason: str


def main() -> int:
    """Print a line for each Python and system. Return the exit code."""
    extras, index = sorted(PROJECT["optional-dependencies"]), own_index()
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(4) as pool:  # most of the time is the network's

        def answers(cell: tuple[str, str]) -> dict[str, Answer]:
            """Return the answer for each extra. All at once fill the cache, so that nothing is asked for twice."""
            python, system = cell
            possible = [extra for extra in extras if (extra, system) not in REFUSED]
            known = bool(resolve(possible, python, system, Path(cache), index).packages)
            resolved = {extra: resolve([extra], python, system, Path(cache), index, known) for extra in possible}
            refused = sorted(set(extras) - set(possible))
            return resolved | {extra: resolve([extra], python, system, Path(cache), index) for extra in refused}

        cells = list(product(PYTHONS, SYSTEMS))
        table = dict(zip(cells, pool.map(answers, cells), strict=True))
    wrong, unseen = [], set()
    for (python, system), resolved in table.items():
        packages = {name: version for each in resolved.values() for name, version in each.packages.items()}
        unseen |= packages.keys() - installed(packages).keys()
        faults = [fault for extra, answer in resolved.items() for fault in judged(extra, system, answer)]
        faults += forbidden(installed(packages), python) + unpinned(packages)
        wrong += [f"Python {python}, {system}: {fault}" for fault in faults]
        refused = [extra for extra, answer in resolved.items() if not answer.packages]
        taken = ", ".join(extra for extra in resolved if extra not in refused)
        print(f"Python {python}, {system}: {taken}" + "".join(f"; {extra} refused" for extra in refused))
    if unseen:
        print("not_run: their Requires-Python, since they are not installed here:", ", ".join(sorted(unseen)))
    print("\n".join(wrong) or "every extra can be installed where the pages say so")
    return 1 if wrong else 0


def resolve(
    extras: Iterable[str], python: str, system: str, cache: Path, index: Mapping[str, str], known: bool = False
) -> Answer:
    """Ask uv for all packages that some extras need; `known`: the cache has what the index says of them."""
    platform, macos = SYSTEMS[system]
    words = [*(word for extra in extras for word in ("--extra", extra)), "--python-version", python]
    words += ["--python-platform", platform, "--only-binary", ":all:", "--no-binary", BUILT, "--cache-dir", str(cache)]
    words += ["--no-python-downloads", "--no-header", "--no-annotate", "--quiet", *(["--offline"] if known else [])]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "-c", "constraints.txt", *words],
        cwd=ROOT, env=os.environ | dict(index) | ({"MACOSX_DEPLOYMENT_TARGET": macos} if macos else {}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return Answer({}, done.stderr.strip())
    return Answer(dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE)), "")


def own_index() -> dict[str, str]:
    """Return the setting by which uv asks the index that pip asks, or nothing where uv has one of its own."""
    if {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & os.environ.keys():
        return {}
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    indices = dict(re.findall(r"^(.+)\.index-url='(.*)'$", listed, re.MULTILINE))
    index = next((indices[place] for place in (":env:", "install", "global") if place in indices), "")
    return {"UV_DEFAULT_INDEX": index} if index else {}


def judged(extra: str, system: str, answer: Answer) -> list[str]:
    """Return what is wrong about the answer for an extra."""
    if (extra, system) not in REFUSED:
        return [] if answer.packages else [f"{extra} is refused: {answer.reason}"]
    if answer.packages:
        return [f"{extra} can be installed, and docs/witness.md says that it can't"]
    return [] if REASON.search(answer.reason) else [f"{extra} is refused for another reason: {answer.reason}"]


def installed(packages: Mapping[str, str]) -> dict[str, str]:
    """Return Requires-Python of the packages that are installed here in the version that is asked for."""
    required = {}
    for each in metadata.distributions():
        name, version = re.sub(r"[-_.]+", "-", each.name).lower(), each.version.partition("+")[0]
        if packages.get(name, "").partition("+")[0] == version:
            required[name] = each.metadata.get("Requires-Python") or ""
    return required


def forbidden(required: Mapping[str, str], python: str) -> list[str]:
    """Return the packages that refuse a Python. uv looks at lower bounds only, and pip at both."""
    newest = Version(f"{python}.99")  # so that a lower bound such as 3.11.4, which is uv's to judge, is no fault here
    return [f"{name} needs Python {asked}" for name, asked in required.items() if newest not in SpecifierSet(asked)]


def unpinned(packages: Mapping[str, str]) -> list[str]:
    """Return the packages whose version constraints.txt leaves to the day of the installation."""
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    loose = sorted(name for name in packages.keys() - pinned if not name.startswith(CUDA))
    return [f"{name} is not in constraints.txt" for name in loose]


if __name__ == "__main__":
    sys.exit(main())
