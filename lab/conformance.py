"""Runs coremltools' own ML Program tests on the portable engine and writes lab/conformance.md.

    python lab/conformance.py --slices 40 --procs 2        # everything; hours on a laptop
    python lab/conformance.py --slices 40 --only 0,1,2     # every 40th case three times: a sample
    python lab/conformance.py --report-only                # the page from what earlier runs left

Outcomes stay in --work as JSON lines, so a run can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "portable"))

from tests.conformance.suites import (  # noqa: E402
    RESULTS,
    SUITES,
    Case,
    read_cases,
    reasons,
    run_slice,
    table,
)

INTRODUCTION = (
    "These are coremltools' own tests of PyTorch operations (through TorchScript, the frontend that shardmill converts "
    "with), of stateful models and of MIL operations. They run unmodified on the portable engine in fp32 mode. "
    "`lab/conformance.py` writes this page; "
    "[`portable/tests/conformance/plugin.py`](../portable/tests/conformance/plugin.py) says what the tests are told "
    "about their surroundings."
)
MEANING = (
    "*Not applicable* means that coremltools skips the case, or expects it to fail, on every platform, or that the "
    "case is about the older neuralnetwork format. *Not run* means that the case needs a package that is not installed "
    "(TensorFlow, torchvision), or that coremltools' converter fails before the engine is called. Cases whose "
    "parameters name the neuralnetwork backend are not counted at all."
)
EXPLAINED = {
    "CropResize": "the box has its corners reversed and lies beyond the image; the test expects the whole image, "
    "which follows from no documented rule",
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=40, help="in how many pieces the cases are cut")
    parser.add_argument("--only", help="comma-separated pieces to run; default all")
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "conformance")
    parser.add_argument("--out", type=Path, default=ROOT / "lab" / "conformance.md")
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not args.report_only:
        pieces = [int(n) for n in args.only.split(",")] if args.only else list(range(args.slices))
        run_pieces(pieces, args.slices, args.procs, args.work)
    cases = read_cases(sorted(args.work.glob("*.jsonl")))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(cases, extent(args.work)), encoding="utf-8")
    print(summary(cases))


def run_pieces(pieces: list[int], count: int, procs: int, work: Path) -> None:
    """Run the pieces that have no finished outcome yet, `procs` at a time."""
    with ThreadPoolExecutor(procs) as pool:
        for number in pieces:
            pool.submit(run_piece, number, count, work)


def run_piece(number: int, count: int, work: Path) -> None:
    """Run one piece of every suite, unless it was run before."""
    target = work / f"{number:03d}_of_{count:03d}.jsonl"
    if target.exists():
        return
    running = target.with_suffix(".running")
    running.unlink(missing_ok=True)
    run_slice(SUITES, f"{number}/{count}", running)
    if running.exists():
        running.rename(target)


def summary(cases: list[Case]) -> str:
    """Return one line: how many cases there are, and how many of them passed."""
    counts = Counter(case.result for case in cases)
    rest = ", ".join(f"{counts[result]} {result}" for result in RESULTS[1:])
    return f"{counts['passed']} of {len(cases)} cases passed ({share(counts['passed'], len(cases))}), {rest}"


def share(part: int, whole: int) -> str:
    """Return a percentage for people."""
    return f"{100 * part / whole:.1f} %" if whole else "none"


def extent(work: Path) -> str:
    """Return how much of all cases was run: the finished slices."""
    slices = sorted(work.glob("[0-9]*_of_[0-9]*.jsonl"))
    count = int(slices[0].stem.split("_of_")[1]) if slices else 0
    return f"{len(slices)} of {count} slices have been run; a slice is every {count}th case of every suite."


def explanations(cases: list[Case]) -> list[str]:
    """Return what is known of the failures, one paragraph."""
    failed = {case.group for case in cases if case.result == "failed"}
    lines = [f"{group}: {text}." for group, text in EXPLAINED.items() if group in failed]
    return ["\n".join(lines)] if lines else []


def page(cases: list[Case], run: str) -> str:
    """Return the text of lab/conformance.md."""
    counts = Counter(case.result for case in cases)
    predicting = sum(case.result == "passed" and case.predictions > 0 for case in cases)
    applicable = counts["passed"] + counts["failed"]
    figures = [
        "| | cases | of all |",
        "|---|---:|---:|",
        f"| ML Program cases | {len(cases)} | 100 % |",
        f"| passed | {counts['passed']} | {share(counts['passed'], len(cases))} |",
        f"| ... and compared predictions | {predicting} | {share(predicting, len(cases))} |",
        *(f"| {result} | {counts[result]} | {share(counts[result], len(cases))} |" for result in RESULTS[1:]),
    ]
    parts = [
        "# Conformance",
        INTRODUCTION,
        run,
        "\n".join(figures),
        f"All but {counts['failed']} of the {applicable} cases that apply and were run passed.",
        MEANING,
        "## What failed, and why",
        reasons(cases, "failed"),
        *explanations(cases),
        "## What was not run, and why",
        reasons(cases, "not run"),
        "## What does not apply, and why",
        reasons(cases, "not applicable"),
        "## By suite and operation",
        table(cases),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
