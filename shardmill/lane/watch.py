"""Runs a child process that may die or hang; each of its measurements becomes a record in any case."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.lane.results import Record

ENTRY = re.compile(r'^( *)"?(NSLocalized\w+|NSUnderlyingError)"? = (".*?"|[^"{(\n][^\n]*);$', re.M | re.S)
USER_INFO = re.compile(r'"?\{\n(?:(.*)\n)?\s*\}"?\.?\s*$', re.S)
UNDERLYING = re.compile(r'Error Domain=(\S+) Code=(-?\d+)(?: \\*"(.*?)\\*"(?= UserInfo=|\}|\)|,|"|$))?', re.S)
ESCAPED = re.compile(r"((?:\\U[0-9a-fA-F]{4})+)|\\([0-7]{3})|\\(.)", re.S)
PLAIN = {"n": "\n", "t": "\t", "r": "\r"}
SAID = ("NSLocalizedDescription", "NSLocalizedFailureReason", "NSLocalizedRecoverySuggestion")
NOTHING = ("", "(null)")
KEPT = 2000  # characters of a text in a record
SILENT = "Core ML gave no description"


def said(error: BaseException) -> str:
    """Return the message of an error in one line.

    For an error of Core ML this is its description. For any other error it is the first line, plus the second if the
    first ends with a colon, or the error's type if the message is empty.
    """
    text = str(error)
    if (told := words(text)) != text:
        return told
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if lines[0] == "{":  # a userInfo that was cut off
        return " ".join(lines)
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def words(text: str) -> str:
    """Replace a userInfo at the end of a text by its message; return any other text unchanged.

    The message consists of the userInfo's description, its reason, and domain, code and text of the underlying errors.
    Without a description it contains all entries.
    """
    inside = USER_INFO.search(text)
    if not inside:
        return text
    return " ".join(f"{text[: inside.start()]}{_told(inside[1] or '') or SILENT}".split())


def _told(entries: str) -> str:
    """Return the message in a userInfo; `entries` are the lines between its braces."""
    found = [(len(match[1]), match[2], _unescaped(match[3])) for match in ENTRY.finditer(entries)]
    outer = min((depth for depth, _, _ in found), default=0)  # a nested entry belongs to another error
    own = {name: value for depth, name, value in found if depth == outer}
    words = [own[name] for name in SAID if name in own]
    if not words:
        return entries
    for domain, code, text in UNDERLYING.findall(own.get("NSUnderlyingError", "")):
        known = text in NOTHING or any(text in word for word in words)
        words.append(f"({domain} {code})" if known else f"({domain} {code}: {text})")
    return " ".join(words)


def _unescaped(value: str) -> str:
    """Return the original of a string printed in a property list."""
    return ESCAPED.sub(_character, value[1:-1]) if value.startswith('"') else value


def _character(match: re.Match[str]) -> str:
    if match[1]:
        return bytes.fromhex(match[1].replace("\\U", "")).decode("utf-16-be", "replace")
    return chr(int(match[2], 8)) if match[2] else PLAIN.get(match[3], match[3])


ENDING = 10.0  # seconds that a child may take to end after its last measurement


@dataclass(frozen=True)
class Watch:
    """How children are run.

    Attributes:
        script: measure.py.
        log: file for the children's output.
        limit: seconds that one measurement may take.
    """

    script: Path
    log: Path
    limit: float


def watched(watch: Watch, task: Mapping[str, Any], begun: Callable[[str], None]) -> Iterator[Record]:
    """Run a child and yield the record of every measurement that it finishes or fails.

    It ends after the first measurement at which the child died or hung; another child makes the rest.

    Args:
        watch: how to run it.
        task: the child's task, see `child`.
        begun: called with the key of each measurement that begins.
    """
    reading, writing = os.pipe()
    with open(watch.log, "ab") as log:
        said = log.tell()
        child = subprocess.Popen(
            [sys.executable, str(watch.script), "--child", str(writing)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(writing,),
            start_new_session=True,
        )
    os.close(writing)
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # the child has died already, which is reported below
            child.stdin.write(json.dumps({**task, "parent": os.getpid()}).encode())
            child.stdin.close()
        yield from _followed(reading, child, watch, said, begun, task["keys"][0])
    finally:
        os.close(reading)
        _kill(child)


def _followed(
    reading: int,
    child: subprocess.Popen[bytes],
    watch: Watch,
    said: int,
    begun: Callable[[str], None],
    first: str,
) -> Iterator[Record]:
    """Yield the records of a running child.

    Before its first report the child counts as being at the first measurement, after the last result at none.
    """
    key, stage, start = first, "start of the process", time.monotonic()
    pending = b""
    while True:
        left = start + (watch.limit if key else ENDING) - time.monotonic()
        ready, _, _ = select.select([reading], [], [], max(left, 0))
        if not ready and not key:
            return  # the engine does not shut down, but all requested measurements are there
        if not ready:
            yield _failed(key, "timeout", f"no end of {stage} within {watch.limit:g} s", start)
            return
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            child.wait()
            if key:
                yield _failed(key, "crashed", f"{_fate(child.returncode)} in {stage}{_tail(watch.log, said)}", start)
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for message in map(json.loads, lines):
            if "begin" in message:
                key, stage = message["begin"], "its beginning"
                begun(key)
            elif "stage" in message:
                stage = message["stage"]
            else:
                message["timing"]["seconds"] = round(time.monotonic() - start, 3)
                key = message.pop("next")
                start = time.monotonic()
                yield message


def _failed(key: str, status: str, detail: str, start: float) -> Record:
    timing = {"seconds": round(time.monotonic() - start, 3)}
    return {"key": key, "status": status, "value": {}, "timing": timing, "detail": detail}


def _fate(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _tail(log: Path, start: int) -> str:
    """Return the last line that a child printed, or the message of a Core ML error at the end of its output."""
    with open(log, "rb") as file:
        file.seek(start)
        lines = file.read()[-4 * KEPT :].decode("utf-8", "replace").strip().split("\n")
    begins = len(lines) - 1
    while begins and lines[begins].startswith((" ", "}")):  # inside a Core ML error, or at its end
        begins -= 1
    said = words("\n".join(lines[begins:])).split("\n")[-1]
    return f": {said.strip()[:KEPT]}" if said else ""


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and all processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
