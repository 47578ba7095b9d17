"""Runs a step as a Snakemake job: names become Paths, errors become one line, everything is logged."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from shardmill import interrupt
from shardmill.errors import ShardmillError
from shardmill.pipeline.disk import full_at
from shardmill.pipeline.lock import join_build

log = logging.getLogger("shardmill")

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
AFTER_THE_GATES = ("manifest", "benchmark", "provenance", "report")


def execute(run: Callable[..., None], snakemake: Any) -> None:
    """Calls `run` with the job's named inputs and outputs as Paths and its parameters as they are.

    `tools` among the parameters only makes Snakemake notice a changed library and is not passed on; `threads` is for
    steps that start some themselves.
    """
    terminal = redirect_output(Path(snakemake.log[0]))
    job = f"shardmill {snakemake.rule} {' '.join(map(str, snakemake.wildcards))}".strip()
    start_logging(terminal, job)
    interrupt.ends_this_process(f"{job}: interrupted", terminal.fileno())
    for name in THREADS:
        os.environ[name] = str(snakemake.threads)  # with other threads sums come out otherwise in their last digits
    arguments = {
        name: as_paths(value) for files in (snakemake.input, snakemake.output) for name, value in files.items()
    }
    arguments |= {name: value for name, value in snakemake.params.items() if name != "tools"}
    if "threads" in inspect.signature(run).parameters:
        arguments["threads"] = snakemake.threads
    try:
        join_build("build")
        if snakemake.rule not in AFTER_THE_GATES:
            withdraw(Path("build") / snakemake.wildcards.model)
        run(**arguments)
        if interrupt.happened():
            raise KeyboardInterrupt  # a library has swallowed it
    except (KeyboardInterrupt, Exception) as error:
        log.debug("failed", exc_info=True)  # the log file has the traceback
        if isinstance(error, KeyboardInterrupt) or interrupt.happened():
            log.error("interrupted")
            sys.exit(interrupt.EXIT_CODE)
        log.error("%s", one_line(error, Path(snakemake.log[0])))
        sys.exit(1)
    finally:
        log.debug("peak memory %d MB, declared %s MB", peak_mb(), snakemake.resources.get("mem_mb"))


def peak_mb() -> float:
    """Most memory that this process had resident, in MB, and with it the largest process that it started.

    Linux counts a child's memory from that of its parent at the start, so only a larger child is one of its own.
    """
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return (own + (child if child > own else 0)) * unit / 1e6


def withdraw(build: Path) -> None:
    """Removes what speaks for the whole build: a part of it is being made or judged again, and they come after that."""
    for name in ("model.json", "provenance.json", "report.html"):
        (build / name).unlink(missing_ok=True)


def as_paths(value: str | Iterable[str]) -> Path | list[Path]:
    """One path or several."""
    return Path(value) if isinstance(value, str) else [Path(item) for item in value]


def one_line(error: Exception, logfile: Path) -> str:
    """What a person should read."""
    full = full_at(error)
    if full is not None:
        return f"{full}: the disk is full; free some space and run the same command again"
    if isinstance(error, ShardmillError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in FORBIDDEN and error.filename:
        return f"{error.filename}: {error.strerror}; allow it and run the same command again"
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"unexpected {type(error).__name__}: {first} (traceback in {logfile})"


def redirect_output(file: Path) -> TextIO:
    """Sends whatever libraries print to the log file; returns the terminal, for what a person should see."""
    file.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    with open(file, "w") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    return terminal


def start_logging(terminal: TextIO, job: str) -> None:
    """Everything into the job's log file (which standard error is by now), progress and errors to the terminal too."""
    log.setLevel(logging.DEBUG)
    to_file = logging.StreamHandler()
    to_file.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    to_terminal = logging.StreamHandler(terminal)
    to_terminal.setLevel(logging.INFO)
    to_terminal.setFormatter(logging.Formatter(f"{job}: %(message)s"))
    log.addHandler(to_file)
    log.addHandler(to_terminal)
