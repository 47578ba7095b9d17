"""Counts the bytes in use in a process that another process watches, without the free pages of its allocators.

Resident memory can't tell a leak of 1 kB per request from free pages: glibc and Python keep the pages of the busiest
moment for later. So a watched process counts what is in use. That is what `malloc` has given out (mallinfo2 of glibc,
malloc_zone_statistics of macOS), and Python's small objects, for which Python maps pages without `malloc`. glibc counts
freed blocks that a thread keeps for itself as used; a thread keeps at most some 200 kB.

The process counts when it gets SIGUSR1, after a collection of dead cycles. Its handler is this file under the name
sitecustomize. Python imports a module of this name at its start if PYTHONPATH leads to it, in child processes too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

NUMBERS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
SMALL = re.compile(r"^# bytes in allocated blocks *= *([\d,]+)$", re.MULTILINE)
PATIENCE = 60.0  # seconds; a handler waits for the end of a pass


class _Glibc(ctypes.Structure):  # struct mallinfo2, malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in NUMBERS]


class _Darwin(ctypes.Structure):  # malloc_statistics_t, malloc/malloc.h
    _fields_ = [("blocks_in_use", ctypes.c_uint)] + [
        (name, ctypes.c_size_t) for name in ("size_in_use", "max_size_in_use", "size_allocated")
    ]


def watched(folder: Path) -> dict[str, str]:
    """Return the environment of a process that counts on SIGUSR1, and whose children do; counts go into `folder`."""
    shutil.copy(__file__, folder / "sitecustomize.py")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def in_use(pid: int, folder: Path) -> int:
    """Return the bytes that are in use in a watched process. Raises TimeoutError if it does not count."""
    file = folder / f"{pid}.bytes"
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} did not count its memory")
        time.sleep(0.05)
    return int(file.read_text())


def _count(number: int, frame: object) -> None:
    """Write the bytes that are in use in this process into the folder of this file."""
    gc.collect()
    file = Path(__file__).with_name(f"{os.getpid()}.bytes")
    written = file.with_suffix(".part")
    written.write_text(str(_of_malloc() + _of_small_objects()))
    written.rename(file)


def _of_malloc() -> int:
    library = ctypes.CDLL(None)
    if sys.platform == "darwin":
        statistics = _Darwin()
        library.malloc_zone_statistics(None, ctypes.byref(statistics))  # of all zones
        return int(statistics.size_in_use)
    library.mallinfo2.restype = _Glibc
    counted = library.mallinfo2()
    return int(counted.uordblks + counted.hblkhd)


def _of_small_objects() -> int:
    """Return the bytes of Python's small objects, which Python tells on the standard error alone."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        match = SMALL.search(file.read().decode())
    return int(match[1].replace(",", "")) if match else 0  # with PYTHONMALLOC=malloc they are malloc's


if __name__ == "sitecustomize":
    signal.signal(signal.SIGUSR1, _count)
