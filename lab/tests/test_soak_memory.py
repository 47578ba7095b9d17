"""Bytes in use, as lab/soak.py compares them: they show a leak of a kilobyte per request, and no kept pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lab_script import load_script

soak_memory = load_script("soak_memory")
REQUESTS = 2000
KEPT = 200_000  # bytes: blocks that a thread keeps after they were freed, which glibc counts as used
SERVER = """import ctypes, gc, sys
gc.disable()
native = ctypes.CDLL(None)
left = []
def busy():
    many = [bytearray(900) for _ in range(20_000)] + [[i] for i in range(200_000)]
    del many[:-1]
for line in sys.stdin:
    busy()
    for i in range(2000):
        {request}
    print(flush=True)
"""


def grown(folder: Path, request: str) -> int:
    """Growth of a process with 2000 requests, in bytes in use, once it has been busy."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(request=request)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=soak_memory.watched(folder),
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    found: list[int] = []
    try:
        for _ in range(2):
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
            found.append(soak_memory.in_use(process.pid, folder))
    finally:
        process.kill()
        process.communicate()
    return found[1] - found[0]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param("left.append(bytearray(1000))", id="malloc"),
        pytest.param("left.append([bytes(60) for _ in range(10)])", id="small objects"),
        pytest.param("native.malloc(1000)", id="native"),
    ],
)
def test_a_leak_of_a_kilobyte_per_request_is_found(tmp_path: Path, request_: str) -> None:
    """Wherever the kilobyte lies. The first count may hold freed blocks that the second does not."""
    assert 1000 * REQUESTS - KEPT <= grown(tmp_path, request_) <= 2000 * REQUESTS


@pytest.mark.parametrize("request_", ["pass", "cycle = []; cycle.append(cycle); cycle.append(bytearray(1000))"])
def test_pages_that_are_kept_and_dead_cycles_are_no_leak(tmp_path: Path, request_: str) -> None:
    """The busiest moment leaves pages, which are in no use."""
    assert abs(grown(tmp_path, request_)) < KEPT


def test_a_child_counts_too(tmp_path: Path) -> None:
    """The engine is a child of the server."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(0, flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", child],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=soak_memory.watched(tmp_path),
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        parent.stdout.readline()
        (engine,) = psutil.Process(parent.pid).children()
        assert soak_memory.in_use(engine.pid, tmp_path) > 1_000_000
        parent.communicate("\n")
