"""Runs `shardmill serve` in a separate process, from its start to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shardmill.bench.follow import follow_parent
from shardmill.errors import ShardmillError

MAIN = "from shardmill.cli import main; main()"
SHARDMILL = (sys.executable, "-c", MAIN)
FOLLOW = f"from {follow_parent.__module__} import {follow_parent.__name__}; {follow_parent.__name__}()"
GREETING = re.compile(
    r"serving (?P<model>\S+) on the \S+ engine( \((?P<threads>\d+) threads?\))? at (?P<url>http://\S+)/v1"
)
PATIENCE = 20.0  # seconds to end in order


@dataclass(frozen=True)
class Server:
    """A server that is ready.

    Attributes:
        model: the name of the served model.
        url: its address without a path.
        threads: number of the engine's threads, if it can choose.
        ready_seconds: time from the start of the process until it was ready.
    """

    model: str
    url: str
    threads: int | None
    ready_seconds: float


def command(build: Path, draft: Path | None, precision: str, guard_margin: float = 0.0) -> list[str]:
    """Return the command that starts the server of a build on a free port of this machine."""
    more = ["--draft-build", str(draft)] if draft else []
    more += ["--guard-margin", str(guard_margin)] if guard_margin else []
    options = ["--port", "0", "--drafter", "none", "--precision", precision, *more]
    return [sys.executable, "-c", f"{FOLLOW}; {MAIN}", "serve", str(build), *options]


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[Server]:
    """Run the server that a command starts: ready inside the block, gone after it.

    Raises:
        ShardmillError: the server ended before it was ready.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SHARDMILL_API_KEY"}
    with tempfile.TemporaryFile("w+") as complaints:
        start = time.perf_counter()
        process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
        )
        try:
            greeting = _greeting(process, complaints)
            threads = int(greeting["threads"]) if greeting["threads"] else None
            server = Server(greeting["model"], greeting["url"], threads, time.perf_counter() - start)
            try:
                yield server
            except ShardmillError:
                sys.stderr.write(_said(complaints))  # the error itself has only the last line
                raise
        finally:
            _end(process)


def _greeting(process: subprocess.Popen[str], complaints: IO[str]) -> re.Match[str]:
    """Return the line with the server's address."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := GREETING.match(line):
            return found
    process.wait()
    last = (_said(complaints).strip().splitlines() or ["it said nothing"])[-1]
    raise ShardmillError(f"the server ended before it was ready: {last.removeprefix('shardmill: ')}")


def _said(complaints: IO[str]) -> str:
    complaints.seek(0)
    return complaints.read()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
