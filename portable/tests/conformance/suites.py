"""Which of coremltools' test files are run, how one slice of them is run, and the table that comes out.

The files are used as installed with the coremltools wheel; nothing in them is changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITES = (
    "converters/mil/frontend/torch/test/test_torch_stateful_model.py",
    "converters/mil/mil/ops/tests",
    "converters/mil/frontend/torch/test/test_torch_ops.py",
)
RESULTS = ("passed", "failed", "not run", "not applicable")
OPTIONS = [
    "-q",
    "--no-header",
    "--disable-warnings",
    "--tb=no",
    "-W",
    "ignore",
    "-p",
    "no:cacheprovider",
    "-p",
    "tests.conformance.plugin",
]


@dataclass(frozen=True)
class Case:
    """One test case: the file it is in, the operation (test class) it belongs to, how it ended (plugin.result_of),
    why if it did not pass, and how many predictions it made.
    """

    case: str
    suite: str
    group: str
    result: str
    reason: str
    predictions: int = 0


def coremltools_dir() -> Path:
    """Where coremltools is installed, found without importing it."""
    spec = find_spec("coremltools")
    if spec is None or spec.origin is None:
        raise RuntimeError("coremltools is not installed")
    return Path(spec.origin).parent


def run_slice(
    suites: Sequence[str], piece: str, out: Path, extra: Sequence[str] = (), timeout: float | None = None
) -> None:
    """Runs `piece` ("index/count") of some suites in a process of its own; outcomes are appended to `out`."""
    base = coremltools_dir()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "extra"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {
        "PYTHONPATH": paths,
        "CONFORMANCE_SLICE": piece,
        "CONFORMANCE_OUT": str(out),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        *OPTIONS,
        f"--rootdir={out.parent}",
        *extra,
        *(str(base / s) for s in suites),
    ]
    subprocess.run(
        command,
        env=env,
        cwd=out.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )


def read_cases(paths: Iterable[Path]) -> list[Case]:
    """Outcomes from files that run_slice wrote, one per case (the last one counts)."""
    found: dict[str, Case] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            case = Case(**json.loads(line))
            found[case.case] = case
    return list(found.values())


def short_suite(suite: str) -> str:
    """A file's name without what all have in common."""
    return (
        suite.removeprefix("converters/mil/")
        .replace("frontend/torch/test/", "torch/")
        .replace("mil/ops/tests/", "ops/")
    )


def table(cases: Sequence[Case]) -> str:
    """Markdown: suite, operation, and how many cases ended how."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case in cases:
        counts.setdefault((short_suite(case.suite), case.group), Counter())[case.result] += 1
    lines = [f"| suite | operation | {' | '.join(RESULTS)} |", "|---|---" + "|---:" * len(RESULTS) + "|"]
    for (suite, group), count in sorted(counts.items()):
        lines.append(f"| {suite} | {group} | " + " | ".join(str(count[r]) for r in RESULTS) + " |")
    return "\n".join(lines)


def reasons(cases: Sequence[Case], result: str) -> str:
    """Markdown: why cases ended with `result`, the commonest first."""
    counts = Counter((short_suite(c.suite), c.group, _stable(c.reason)) for c in cases if c.result == result)
    lines = ["| suite | operation | cases | reason |", "|---|---|---:|---|"]
    for (suite, group, reason), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {suite} | {group} | {count} | {reason} |")
    return "\n".join(lines)


def _stable(reason: str) -> str:
    text = reason.replace("|", "\\|").replace("\n", " ")
    return " ".join(word for word in text.split() if not word.startswith("/tmp"))[:160]
