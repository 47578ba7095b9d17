"""Progress on the terminal: the current measurement, its result, and an estimate of the time left."""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.lane.results import Record, Results
from shardmill.lane.todo import Group, seconds_left

SHOWN = ("load_seconds", "plan_seconds", "ms", "psnr", "width_error_fp16", "margin")  # figures to show, if present


class Progress:
    """Lines on the terminal."""

    def __init__(self, groups: Sequence[Group], results: Results) -> None:
        """Print a line if an earlier run has left results."""
        self._all = [measurement for group in groups for measurement in group.measurements]
        self._results = results
        if results.records:
            print(f"going on: {len(results.records)} measurements are there already", flush=True)

    def begin(self, key: str) -> None:
        """Print that a measurement begins."""
        print(f"{self._place()} {key} ...", flush=True)

    def done(self, record: Record) -> None:
        """Print the result of a measurement."""
        words = [record["status"], f"{record['timing']['seconds']:.1f} s" if "seconds" in record["timing"] else ""]
        figures = {**record["value"], **record["timing"]}
        words += [f"{name} {figures[name]:.4g}" for name in SHOWN if figures.get(name) is not None]
        words += [record["detail"], self._left()]
        print(f"{self._place()} {record['key']}: {', '.join(word for word in words if word)}", flush=True)

    def _place(self) -> str:
        finished = sum(m.key in self._results.records for m in self._all)
        return f"[{finished}/{len(self._all)}]"

    def _left(self) -> str:
        todo = [m for m in self._all if m.key not in self._results.records]
        seconds = seconds_left(todo, self._results.records, self._all)
        if not seconds:
            return ""
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
