"""The files of a kit: kit.json, which describes it, and the results, which lie beside it.

results.jsonl has one line for each finished measurement, on disk before the next one begins. Its first line identifies
kit, engine and machine; a run continues only the lines of the same kit on the same system. A line that a killed run
left incomplete is cut off. A line that was damaged later stays, is reported, and does not count.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HOW = "python3.12 -m venv .venv && .venv/bin/pip install coremltools==9.0 numpy && .venv/bin/python measure.py"
KIT, KIT_FORMAT = "kit.json", 1
KIND, RESULT_FORMAT = "shardmill device measurements", 1
UNHINTED, CPU, PORTABLE = "unhinted", "cpu", "portable"  # ways to load a program besides its build's way
ASKED = "questions"  # how the keys of the lines of questions begin; no variant is called so
OK, NOT_RUN = "ok", "not_run"
STATUSES = (OK, "wrong", "refused", "crashed", "timeout", NOT_RUN)
SEAL = "shardmill_seal"
Record = dict[str, Any]  # key, status, value, timing, detail


class KitError(Exception):
    """An error in one line for the person who measures."""


@dataclass(frozen=True)
class Unit:
    """One program of a part, for some widths. A part has several if its widths are separate programs.

    Attributes:
        name: the part's name, with the program's index if there are several.
        part: the part as kit.json describes it.
        program: `path` of the package, `function` in it or null, `widths`, `fixed`, `weights` in bytes.
            Also `of`, if another variant has the same program; `alone`, if the function has a separate bundle;
            `reshape_frequency`, the hint of flexible shapes; `bundle`, the portable compiler's, file by file, or null.
        variant: the variant under whose name the program is compiled and measured.
    """

    name: str
    part: dict[str, Any]
    program: dict[str, Any]
    variant: str

    @property
    def called(self) -> str | None:
        """Return the function's name in the compiled program; None for the only one."""
        return None if self.program.get("alone") else self.program["function"]


@dataclass(frozen=True)
class Kit:
    """An unpacked kit.

    Attributes:
        folder: the folder of the kit.
        digest: sha256 of kit.json, which names the sha256 of every other file.
        content: the content of kit.json.
    """

    folder: Path
    digest: str
    content: dict[str, Any]

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        """Return the variants by name, in the kit's order."""
        return {variant["name"]: variant for variant in self.content["variants"]}

    @property
    def questions(self) -> list[dict[str, Any]]:
        """Return the questions about the system, in the kit's order."""
        return list(self.content.get("questions", ()))

    def units(self, variant: str) -> dict[str, Unit]:
        """Return the programs of a variant by name, in the order of a pass."""
        units = {}
        for part in self.variants[variant]["parts"]:
            several = len(part["programs"]) > 1
            for place, program in enumerate(part["programs"]):
                name = f"{part['name']}.{place}" if several else part["name"]
                units[name] = Unit(name, part, program, program.get("of", variant))
        return units


def read_kit(folder: Path) -> Kit:
    """Read the kit in a folder. Raises KitError if it is missing or has another format."""
    try:
        raw = (folder / KIT).read_bytes()
        content = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise KitError(f"{folder / KIT} can't be read ({error}); unpack the kit again") from error
    if not isinstance(content, dict) or content.get("format") != KIT_FORMAT:
        raise KitError(f"{folder / KIT} is not of format {KIT_FORMAT}; unpack the kit again")
    variants = content.get("variants")
    named = isinstance(variants, list) and all(isinstance(one, dict) and "name" in one for one in variants)
    if not named or not isinstance(content.get("files"), dict):
        raise KitError(f"{folder / KIT} does not name variants and files; unpack the kit again")
    return Kit(folder, hashlib.sha256(raw).hexdigest(), content)


def check_kit(kit: Kit) -> None:
    """Raise KitError, naming the first file that differs from the packed one."""
    for name, sha in kit.content["files"].items():
        path = kit.folder / name
        if not path.is_file():
            raise KitError(f"{path} is missing; unpack the kit again")
        if _sha256(path) != sha:
            raise KitError(f"{path} is not the file that was packed; unpack the kit again")


def _sha256(path: Path) -> str:
    known = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            known.update(block)
    return known.hexdigest()


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


class Results:
    """A file of lines, and its records by key."""

    def __init__(self, path: Path, header: Record) -> None:
        """Open or create the file. Raises KitError if it is another run's, or if another run is writing to it."""
        self.path, self.header = path, json.loads(json.dumps(header))
        self.records: dict[str, Record] = {}
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KitError(f"another run is writing to {path}; wait for it or stop it") from None
        lines = _whole_lines(path)
        if lines and lines[0] != self.header:
            raise KitError(f"{path} is of another {_difference(lines[0], self.header)}; move it away and start again")
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


def _difference(header: Any, this_run: Record) -> str:
    """Return a text with the differences between the file's header and this run's."""
    if not isinstance(header, dict) or header.keys() != this_run.keys():
        return "kit, engine or system"
    names = [name for name in ("kit", "engine") if header[name] != this_run[name]]
    theirs = header["machine"] if isinstance(header["machine"], dict) else {}
    changed = [name for name, value in this_run["machine"].items() if theirs.get(name) != value]
    names += [f"{name} ({_plain(theirs.get(name))}, this is {_plain(this_run['machine'][name])})" for name in changed]
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
        rows = {key.split("/", 1)[1]: row for key, row in results.records.items() if key.startswith(f"{name}/")}
        variants[name] = {
            **{key: variant[key] for key in ("model", "source", "described", "artifacts")},
            "measurements": {key: {k: v for k, v in rows[key].items() if k != "key"} for key in sorted(rows)},
        }
    content = {"format": RESULT_FORMAT, "kind": KIND, **results.header, "variants": variants}
    if kit.questions:
        lines = {key: {k: v for k, v in one.items() if k != "key"} for key, one in sorted(results.records.items())}
        asked = {key: line for key, line in lines.items() if key.startswith(f"{ASKED}/")}
        content["questions"] = {"asked": kit.questions, "measurements": asked}
    write_durably(path, dumps(sealed(content)))
