"""Runs a step as a Snakemake job: names become Paths, errors become one line, everything is logged."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from shardmill.errors import ShardmillError

log = logging.getLogger("shardmill")

AFTER_THE_GATES = ("manifest", "benchmark", "provenance", "report")


def execute(run: Callable[..., None], snakemake: Any) -> None:
    """Calls `run` with the job's named inputs and outputs as Paths and its parameters as they are.

    `tools` among the parameters only makes Snakemake notice a changed library and is not passed on.
    """
    terminal = redirect_output(Path(snakemake.log[0]))
    start_logging(terminal, f"{snakemake.rule} {' '.join(map(str, snakemake.wildcards))}")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(snakemake.threads))
    arguments = {
        name: as_paths(value) for files in (snakemake.input, snakemake.output) for name, value in files.items()
    }
    arguments |= {name: value for name, value in snakemake.params.items() if name != "tools"}
    try:
        if snakemake.rule not in AFTER_THE_GATES:
            withdraw(Path("build") / snakemake.wildcards.model)
        run(**arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        log.debug("failed", exc_info=True)  # the log file has the traceback
        log.error("%s", one_line(error, Path(snakemake.log[0])))
        sys.exit(1)


def withdraw(build: Path) -> None:
    """Removes model.json: what it speaks for is being made or judged again. Its own job runs after all of those."""
    (build / "model.json").unlink(missing_ok=True)


def as_paths(value: str | Iterable[str]) -> Path | list[Path]:
    """One path or several."""
    return Path(value) if isinstance(value, str) else [Path(item) for item in value]


def one_line(error: Exception, logfile: Path) -> str:
    """What a person should read."""
    if isinstance(error, ShardmillError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error.filename or 'build'}: the disk is full; free some space and run the same command again"
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
    to_terminal.setFormatter(logging.Formatter(f"shardmill {job.strip()}: %(message)s"))
    log.addHandler(to_file)
    log.addHandler(to_terminal)
