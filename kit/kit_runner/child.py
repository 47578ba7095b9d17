"""The process that loads and runs programs. It reports each measurement's beginning, stages and result to its parent.

It may die at any moment; only the measurement in progress is lost.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kit_runner.error_texts import KEPT, said
from kit_runner.job import MeasurementJob, Refused, WrongError
from kit_runner.kit import read_kit
from kit_runner.measurements import MEASURES, check
from kit_runner.plan import CHECK

FULL = (errno.ENOSPC, errno.EDQUOT)
LEAST_FREE = 1 << 20  # bytes; nothing can be compiled with less
HEARTBEAT = 0.5  # seconds between looks at the parent


def run_child(pipe: int, script: Path) -> None:
    """Run the measurements of the task on standard input.

    Args:
        pipe: file descriptor that the parent reads.
        script: measure.py, which lies beside the kit.
    """
    task = json.load(sys.stdin)
    threading.Thread(target=_follow, args=(task["parent"],), daemon=True).start()

    def tell(message: dict[str, Any]) -> None:
        os.write(pipe, (json.dumps(message, allow_nan=False) + "\n").encode())

    keys = task["keys"]
    tell({"stage": "the import of coremltools"})
    if task["engine"]:
        importlib.import_module(task["engine"]).install(precision="fp16")
    import coremltools  # noqa: F401 (if this fails, it is reported as the stage's failure)

    job = MeasurementJob(read_kit(Path(task["kit"])), Path(task["work"]), task, lambda stage: tell({"stage": stage}))
    for key, following in zip(keys, [*keys[1:], ""], strict=True):
        tell({"begin": key})
        record = {"key": key, **measure_one(job, key), "next": following}
        tell(record)


def measure_one(job: MeasurementJob, key: str) -> dict[str, Any]:
    """Return one measurement's record; an error of the engine is a result too."""
    name = key.rsplit("/", 1)[1]
    kind, _, number = name.partition(".T=") if ".T=" in name else name.partition("#")
    try:
        if name.startswith(CHECK):
            measured = check(job, name.removeprefix(CHECK))
        else:
            measured = MEASURES[kind](job, int(number or 0))
        return {"status": "ok", "value": _finite(measured.value), "timing": _finite(measured.timing), "detail": ""}
    except WrongError as error:
        return {"status": "wrong", "value": _finite(error.value), "timing": {}, "detail": str(error)}
    except Refused as error:
        return {"status": "not_run", "value": {}, "timing": {}, "detail": str(error)}
    except Exception as error:
        status = "not_run" if _is_full(error, job.work) else "refused"
        return {"status": status, "value": {}, "timing": {}, "detail": f"{job.stage_name}: {said(error)}"[:KEPT]}


def _is_full(error: BaseException, folder: Path) -> bool:
    """Return whether the cause was a full disk; some libraries report it only in the message, or not at all."""
    told = isinstance(error, OSError) and error.errno in FULL
    disk = next(place for place in (folder, *folder.parents) if place.exists())
    return told or any(os.strerror(code) in str(error) for code in FULL) or shutil.disk_usage(disk).free < LEAST_FREE


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON lacks by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _follow(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(HEARTBEAT)
    os._exit(1)
