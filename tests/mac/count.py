"""What a simulated Mac's log says: python tests/mac/count.py LOG

Prints, for each job, its processes, loads, plans, compilations and first passes, by how many tokens these had; then
how often anything else happened, with the first case of each.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COUNTED = ("load", "plan", "compile", "first_pass")
Row = Mapping[str, Any]


def read(log: Path) -> list[Row]:
    """Return the events of a log, in order."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return a line for each job, and their sum."""
    jobs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["event"] in COUNTED:
            jobs[row["job"]].append(row)
    lines = [["job", "processes", "loads", "plans", "compilations", "first passes", "by tokens"]]
    for name, found in (*sorted(jobs.items()), ("sum", [row for each in jobs.values() for row in each])):
        counts = Counter(row["event"] for row in found)
        widths = Counter(row["tokens"] for row in found if row["event"] == "first_pass")
        by_tokens = ", ".join(f"T={tokens}: {count}" for tokens, count in sorted(widths.items()))
        processes = len({row["pid"] for row in found})
        lines.append([name, str(processes), *(str(counts[event]) for event in COUNTED), by_tokens])
    return lines


def others(rows: Sequence[Row]) -> list[str]:
    """Return a line for each kind of event that the table does not count."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["event"] not in COUNTED:
            found[row["event"]].append(row)
    strided = [row for row in rows if row.get("strided")]
    if strided:
        found["first_pass with inputs that are not contiguous"] = strided
    return [f"{name}: {len(each)}, the first: {json.dumps(each[0])}" for name, each in sorted(found.items())]


def main() -> None:
    """Print the log that is named."""
    rows = read(Path(sys.argv[1]))
    lines = table(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(*others(rows), sep="\n")


if __name__ == "__main__":
    main()
