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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardmill.lane.bisect import cut_and_load, list_operations
from shardmill.lane.job import Found, MeasurementJob, Refused, WrongError
from shardmill.lane.kit import CPU, UNHINTED, read_kit
from shardmill.lane.measurements import compile_program, load_portable, load_unit, parity, residency, speed, switch
from shardmill.lane.watch import KEPT, said
from shardmill.lane.whole import energy, load_all, soak, time_passes, time_widths

FULL = (errno.ENOSPC, errno.EDQUOT)
LEAST_FREE = 1 << 20  # bytes; nothing can be compiled with less
HEARTBEAT = 0.5  # seconds between looks at the parent
MEASURES: dict[str, Callable[[MeasurementJob, int], Found]] = {
    "compile": compile_program,
    "load.first": load_unit,
    "load.warm": load_unit,
    "load.portable": load_portable,
    "parity": parity,
    "speed": speed,
    "switch": switch,
    **{f"load.{way}": partial(load_unit, way=way) for way in (UNHINTED, CPU)},
    **{f"speed.{way}": partial(speed, way=way) for way in (UNHINTED, CPU)},
    f"switch.{UNHINTED}": partial(switch, way=UNHINTED),
    "residency": residency,
    "bisect": cut_and_load,
    "bisect.operations": list_operations,
    "load.whole": load_all,
    "pass": time_passes,
    "widths": time_widths,
    "energy": energy,
    "soak.kept": partial(soak, kept=True),
    "soak.fresh": partial(soak, kept=False),
}


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
        record = {"key": key, **_measured(job, key), "next": following}
        tell(record)


def _measured(job: MeasurementJob, key: str) -> dict[str, Any]:
    """Return one measurement's record; an error of the engine is a result too."""
    name = key.rsplit("/", 1)[1]
    kind, _, number = name.partition(".T=") if ".T=" in name else name.partition("#")
    try:
        found = MEASURES[kind](job, int(number or 0))
        value, timing = _finite(found.value), _finite(found.timing)
        return {"status": found.status, "value": value, "timing": timing, "detail": found.detail}
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
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return told or any(os.strerror(code) in str(error) for code in FULL) or shutil.disk_usage(there).free < LEAST_FREE


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON lacks by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _follow(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(HEARTBEAT)
    os._exit(1)
