"""Programs that processes start: a Mac without Rosetta starts none for x86_64, and forks after Core ML was loaded fail
at random, so they are logged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from simulated_mac import log

BIN = Path(os.environ.get("SIMULATED_MAC", "/nowhere")) / "bin"
SYSTEM = ("/usr/bin/", "/usr/sbin/", "/bin/", "/sbin/")
BAD_CPU_TYPE = 86  # macOS's EBADARCH
MACHO_X86_64 = b"\xcf\xfa\xed\xfe\x07\x00\x00\x01"  # mach-o/loader.h: MH_MAGIC_64, CPU_TYPE_X86_64
HEAVY = ("coremltools.libcoremlpython", "torch", "numpy", "tokenizers", "transformers")
_open = open  # before /proc is hidden


def watch() -> None:
    """Begin to look at each program and each fork."""
    sys.addaudithook(_audit)
    real = subprocess.Popen.__init__

    def started(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        real(self, _simulated(args), *rest, **options)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]


def _simulated(args: Any) -> Any:
    """Return a command in which the simulated program replaces one of macOS that is named by its absolute path."""
    if isinstance(args, list | tuple) and args and str(args[0]).startswith(SYSTEM):
        own = BIN / Path(args[0]).name
        if own.is_file():
            return [str(own), *args[1:]]
    return args


def _audit(event: str, details: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        _refuse_x86(os.fsdecode(details[0]))
    elif event in ("os.fork", "os.forkpty"):
        loaded = [name for name in HEAVY if name in sys.modules]
        log.write("fork", native=HEAVY[0] in loaded, heavy=loaded, threads=threading.active_count())


def _refuse_x86(program: str) -> None:
    path = shutil.which(program)
    if path is None:
        return
    try:
        with _open(path, "rb") as file:
            first = file.read(len(MACHO_X86_64))
    except OSError:
        return
    if first == MACHO_X86_64:
        log.write("bad_cpu_type", program=path)
        raise OSError(BAD_CPU_TYPE, "Bad CPU type in executable", path)
