"""Runs a child process that may die or hang; each of its measurements becomes a record in any case."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit_runner.error_texts import KEPT, words
from kit_runner.kit import Record

ENDING = 10.0  # seconds that a child may take to end after its last measurement


def supervise(
    script: Path, task: Mapping[str, Any], log: Path, limit: float, begun: Callable[[str], None]
) -> Iterator[Record]:
    """Run a child and yield the record of every measurement that it finishes or fails.

    It ends after the first measurement at which the child died or hung; another child makes the rest.

    Args:
        script: measure.py.
        task: the child's task, see `child`.
        log: file for the child's output.
        limit: seconds that one measurement may take.
        begun: called with the key of each measurement that begins.
    """
    printed = log.stat().st_size if log.exists() else 0
    child, reading = _start(script, log)
    # Before its first report the child counts as being at the first measurement, after the last result at none.
    key, stage, start = task["keys"][0], "start of the process", time.monotonic()

    def failed(status: str, detail: str) -> Record:
        timing = {"seconds": round(time.monotonic() - start, 3)}
        return {"key": key, "status": status, "value": {}, "timing": timing, "detail": detail}

    pending = b""
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # the child has died already, which its pipe shows
            child.stdin.write(json.dumps({**task, "parent": os.getpid()}).encode())
            child.stdin.close()
        while True:
            left = start + (limit if key else ENDING) - time.monotonic()
            ready, _, _ = select.select([reading], [], [], max(left, 0))
            if not ready:
                if key:  # otherwise only the engine's shutdown hangs: all requested measurements are there
                    yield failed("timeout", f"no end of {stage} within {limit:g} s")
                return
            chunk = os.read(reading, 1 << 16)
            if not chunk:
                child.wait()
                if key:
                    yield failed("crashed", f"{_fate(child.returncode)} in {stage}{_tail(log, printed)}")
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
    finally:
        os.close(reading)
        _kill(child)


def _start(script: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a child; return it, and the file descriptor of its reports."""
    reading, writing = os.pipe()
    with open(log, "ab") as file:
        child = subprocess.Popen(
            [sys.executable, str(script), "--child", str(writing)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            pass_fds=(writing,),
            start_new_session=True,
        )
    os.close(writing)
    return child, reading


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
