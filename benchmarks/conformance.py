"""Runs coremltools' own ML Program tests on the portable engine and writes docs/conformance.md.

    python benchmarks/conformance.py --slices 40 --procs 2        # everything; hours on a laptop
    python benchmarks/conformance.py --slices 40 --only 0,1,2     # every 40th case three times: a sample
    python benchmarks/conformance.py --report-only                # the page from what earlier runs left

Outcomes stay in --work as JSON lines, so a run can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.conformance.suites import ROOT, SUITES, Case, read_cases, reasons, run_slice, table  # noqa: E402


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=40, help="in how many pieces the cases are cut")
    parser.add_argument("--only", help="comma-separated pieces to run; default all")
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "conformance")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "conformance.md")
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
    """Runs the pieces that have no finished outcome yet, `procs` at a time."""
    with ThreadPoolExecutor(procs) as pool:
        for number in pieces:
            pool.submit(run_piece, number, count, work)


def run_piece(number: int, count: int, work: Path) -> None:
    """One piece of every suite, unless it was run before."""
    target = work / f"{number:03d}_of_{count:03d}.jsonl"
    if target.exists():
        return
    running = target.with_suffix(".running")
    running.unlink(missing_ok=True)
    run_slice(SUITES, f"{number}/{count}", running)
    if running.exists():
        running.rename(target)


def summary(cases: list[Case]) -> str:
    """One line: how many passed of those that apply."""
    counts = Counter(case.result for case in cases)
    applicable = counts["passed"] + counts["failed"]
    share = 100 * counts["passed"] / applicable if applicable else 0.0
    passed, rest = counts["passed"], counts["not applicable"]
    return f"{passed} of {applicable} applicable cases passed ({share:.1f} %), {rest} not applicable"


def extent(work: Path) -> str:
    """How much of all cases was run: the finished slices."""
    found = sorted(work.glob("[0-9]*_of_[0-9]*.jsonl"))
    count = int(found[0].stem.split("_of_")[1]) if found else 0
    return f"Run so far: {len(found)} of {count} slices, a slice being every {count}th case of every suite."


def page(cases: list[Case], run: str) -> str:
    """docs/conformance.md."""
    return (
        "\n\n".join(
            [
                "# Conformance",
                "coremltools' own tests, unmodified, on the portable engine in fp32 mode, written down by "
                "`benchmarks/conformance.py`.",
                run,
                f"{summary(cases)}. *Not applicable* are the cases that coremltools itself skips or expects to fail, "
                "and those that fail inside its converter, before the engine is asked (most because coremltools "
                "9.0 meets numpy 2.4).",
                "## What failed, and why",
                reasons(cases, "failed"),
                "## By suite and operation",
                table(cases),
                "## What did not apply",
                reasons(cases, "not applicable"),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
