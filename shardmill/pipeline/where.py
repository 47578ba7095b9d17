"""Where jobs run: on this machine, or wherever Snakemake's executor sends them.

While the rules are read, Snakemake does not say which executor there will be. It does say how many jobs there may be at
a time (`--jobs`), which is asked for where they run elsewhere, and only there.
"""

from __future__ import annotations

import platform
from typing import Any

from shardmill.machine import memory_bytes

SNAKEMAKE_MB = 500  # a job that was sent somewhere holds up to three Snakemakes of 148 MB beside its own process
MATRICES = 4  # that a job measures at a time, at most
TENTHS, TENTHS_OF_A_MAC = 9, 6  # of this machine's memory, for all jobs together, see `most_mb`
NODE_CORES = 4  # as many as any rule asks for that does not want a machine to itself


def _sends_jobs(workflow: Any) -> bool:
    """Whether this process sends its jobs to other machines."""
    return bool(workflow.is_main_process and workflow.global_resources.get("_nodes").value is not None)


def most_mb(workflow: Any) -> int | None:
    """MB that jobs may use together, None for any: what `--resources mem_mb` says, else a share of what is here.

    The share is nine tenths, and six on a Mac. There the GPU and the Neural Engine use the same memory, and the weights
    of each loaded program are held by the system beside the process that has loaded them.

    The share is told to Snakemake, which keeps to it. It says nothing of machines that jobs are sent to.
    """
    given: int | None = workflow.global_resources.get("mem_mb").value
    if given is None and workflow.is_main_process and not _sends_jobs(workflow):
        tenths = TENTHS_OF_A_MAC if platform.system() == "Darwin" else TENTHS
        given = memory_bytes() * tenths // 10_000_000
        workflow.global_resources["mem_mb"] = given
    return given


def held_mb(workflow: Any) -> int:
    """MB that a job needs beside its own process."""
    return SNAKEMAKE_MB if _sends_jobs(workflow) else 0


def matrices_at_once(wildcards: Any) -> int:
    """The cores of a job that measures a part's matrices one by one; a slice of the LM head has one only."""
    return MATRICES if wildcards.part.startswith("layers") else 1


def every_core(workflow: Any) -> int:
    """The cores of a job that has a machine to itself: all that --cores gives.

    Where jobs go to other machines there may be no such number; then it is NODE_CORES, and of a larger node
    `--set-threads benchmark=N` takes more.
    """
    given: int | None = workflow.global_resources["_cores"].value  # `workflow.cores` ends the run where there is none
    return given or NODE_CORES
