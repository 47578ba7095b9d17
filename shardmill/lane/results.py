"""The results as they come: one line for each finished measurement, on disk before the next begins.

The first line says what is measured where; a run goes on only with the lines of the same kit on the same system. A
line that a killed run left half written is cut off.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardmill.lane.kit import Kit, LaneError
from shardmill.lane.spelling import dumps, sealed, write_durably

FORMAT = 1
KIND = "shardmill device measurements"
OK, NOT_RUN = "ok", "not_run"
STATUSES = (OK, "wrong", "refused", "crashed", "timeout", NOT_RUN)
Record = dict[str, Any]  # key, status, value, timing, detail


class Results:
    """A file of lines, and what they say by key."""

    def __init__(self, path: Path, header: Record) -> None:
        """Opens it, or begins it. Raises LaneError where it is another kit's or another system's."""
        self.path, self.header = path, json.loads(json.dumps(header))
        self.records: dict[str, Record] = {}
        lines = _whole_lines(path)
        if lines and lines[0] != self.header:
            raise LaneError(f"{path} is of another kit, engine or system; move it away and start again")
        finished = (line for line in lines[1:] if line["status"] != NOT_RUN)  # root may measure what a user may not
        self.records |= {line["key"]: line for line in finished}
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        if not lines:
            self._write(self.header)

    def add(self, record: Record) -> None:
        """Keeps a finished measurement."""
        self._write(record)
        self.records[record["key"]] = record

    def status(self, key: str) -> str:
        """That of a measurement; "" for one that is not finished."""
        return str(self.records[key]["status"]) if key in self.records else ""

    def _write(self, content: Record) -> None:
        self._file.write(json.dumps(content, sort_keys=True, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _whole_lines(path: Path) -> list[Record]:
    """The lines that were written to their end; the file is cut off after them."""
    if not path.exists():
        return []
    found, end = [], 0
    raw = path.read_bytes()
    for line in raw.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            break
        end += len(line)
    if end < len(raw):
        os.truncate(path, end)
    return found


def write_result(path: Path, kit: Kit, results: Results) -> None:
    """One JSON of all measurements: canonical, and sealed by its own digest."""
    variants = {}
    for name, variant in kit.variants.items():
        own = {key.split("/", 1)[1]: record for key, record in results.records.items() if key.startswith(f"{name}/")}
        variants[name] = {
            **{key: variant[key] for key in ("model", "source", "described", "artifacts")},
            "measurements": {key: {k: v for k, v in own[key].items() if k != "key"} for key in sorted(own)},
        }
    content = {"format": FORMAT, "kind": KIND, **results.header, "variants": variants}
    write_durably(path, dumps(sealed(content)))
