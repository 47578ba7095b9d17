"""The log: a line of JSON in the file that MAC_LOG names, for each event that is worth counting."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def write(event: str, **details: Any) -> None:
    """Append an event; lines of several processes do not mix."""
    file = os.environ.get("MAC_LOG")
    if not file:
        return
    row = {"event": event, "pid": os.getpid(), "job": job(), "at": round(time.time(), 3), **details}
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(target, (json.dumps(row, default=str) + "\n").encode())
    finally:
        os.close(target)


def job() -> str:
    """Return what this process is: a script by its name, as Snakemake copies it; of a command its first word too."""
    program, *rest = getattr(sys, "argv", [""]) or [""]
    name = Path(program).name
    if name.startswith("tmp") and "." in name:  # tmp1a2b3c4d.residency.py
        return name.partition(".")[2]
    return " ".join([name, *rest[:1]]).strip()
