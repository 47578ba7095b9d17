"""The results file: one line for each finished measurement, on disk before the next one begins.

The first line identifies kit, engine and machine; a run continues only the lines of the same kit on the same system. A
line that a killed run left incomplete is cut off. A line that was damaged later stays, is reported, and does not count.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from shardmill.lane.kit import Kit, LaneError

SEAL = "shardmill_seal"


def dumps(content: Any) -> str:
    """Return JSON with sorted keys, an indentation of one space and a final newline."""
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the sha256 of all other content to a record."""
    body = {key: value for key, value in content.items() if key != SEAL}
    return body | {SEAL: hashlib.sha256(dumps(body).encode()).hexdigest()}


def write_durably(path: Path, text: str) -> None:
    """Write a text so that the file is either complete or absent, even after a power failure."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            _write_out(file)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _write_out(file: IO[str]) -> None:
    """Flush a file to the disk itself; macOS' fsync leaves data in the disk's cache (see its fsync(2))."""
    file.flush()
    whole = getattr(fcntl, "F_FULLFSYNC", None)
    if whole is not None:
        with suppress(OSError):  # not supported by some disks, such as network disks
            fcntl.fcntl(file, whole)
            return
    os.fsync(file.fileno())


FORMAT = 1
KIND = "shardmill device measurements"
OK, NOT_RUN = "ok", "not_run"
STATUSES = (OK, "wrong", "refused", "crashed", "timeout", NOT_RUN)
Record = dict[str, Any]  # key, status, value, timing, detail


class Results:
    """A file of lines, and its records by key."""

    def __init__(self, path: Path, header: Record) -> None:
        """Open or create the file. Raises LaneError if it is another run's, or if another run is writing to it."""
        self.path, self.header = path, json.loads(json.dumps(header))
        self.records: dict[str, Record] = {}
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaneError(f"another run is writing to {path}; wait for it or stop it") from None
        lines = _whole_lines(path)
        if lines and lines[0] != self.header:
            raise LaneError(f"{path} is of another {_difference(lines[0], self.header)}; move it away and start again")
        self.damaged = [place for place, line in enumerate(lines[1:], 2) if not _is_record(line)]
        # A measurement that was not run is tried again: root may measure more than a user, and a disk may have room by
        # now.
        finished = (line for line in lines[1:] if _is_record(line) and line["status"] != NOT_RUN)
        self.records |= {line["key"]: line for line in finished}
        if not lines:
            self._write(self.header)

    def add(self, record: Record) -> None:
        """Append a finished measurement."""
        self._write(record)
        self.records[record["key"]] = record

    def status(self, key: str) -> str:
        """Return the status of a measurement; "" if it is not finished."""
        return str(self.records[key]["status"]) if key in self.records else ""

    def _write(self, content: Record) -> None:
        self._file.write(json.dumps(content, sort_keys=True, allow_nan=False) + "\n")
        _write_out(self._file)


def _difference(found: Any, own: Record) -> str:
    """Return a text with the differences between the file's header and this run's."""
    if not isinstance(found, dict) or found.keys() != own.keys():
        return "kit, engine or system"
    names = [name for name in ("kit", "engine") if found[name] != own[name]]
    theirs = found["machine"] if isinstance(found["machine"], dict) else {}
    changed = [name for name, value in own["machine"].items() if theirs.get(name) != value]
    names += [f"{name} ({_plain(theirs.get(name))}, this is {_plain(own['machine'][name])})" for name in changed]
    return " and ".join(names)


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _whole_lines(path: Path) -> list[Any]:
    """Return the content of each complete line, None for a damaged one; cut the file off after them."""
    raw = path.read_bytes()
    end = raw.rfind(b"\n") + 1
    if end < len(raw):
        os.truncate(path, end)
    return [_parsed(line) for line in raw[:end].split(b"\n")[:-1]]


def _parsed(line: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        return json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def _is_record(line: Any) -> bool:
    """Return whether a line is a measurement, as `add` writes it."""
    kinds = {"key": str, "status": str, "value": dict, "timing": dict, "detail": str}
    return (
        isinstance(line, dict)
        and all(isinstance(line.get(name), kind) for name, kind in kinds.items())
        and line["status"] in STATUSES
    )


def write_result(path: Path, kit: Kit, results: Results) -> None:
    """Write one JSON with all measurements: canonical, and sealed by its own digest."""
    variants = {}
    for name, variant in kit.variants.items():
        own = {key.split("/", 1)[1]: record for key, record in results.records.items() if key.startswith(f"{name}/")}
        variants[name] = {
            **{key: variant[key] for key in ("model", "source", "described", "artifacts")},
            "measurements": {key: {k: v for k, v in own[key].items() if k != "key"} for key in sorted(own)},
        }
    content = {"format": FORMAT, "kind": KIND, **results.header, "variants": variants}
    write_durably(path, dumps(sealed(content)))
