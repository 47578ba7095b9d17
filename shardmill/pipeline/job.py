"""Runs a step as a Snakemake job: names become Paths, errors become one line, everything is logged."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from shardmill import interrupt
from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.imports import spare_coremltools
from shardmill.machine import THREAD_VARIABLES, collect_rarely, engine, package_versions
from shardmill.pipeline import dag, fingerprint, memory, remote, storage, table
from shardmill.pipeline.disk import full_at, uncopied_at
from shardmill.pipeline.lock import join_build
from shardmill.pipeline.perform import describe, perform, read_artifact, receipt_path, taken
from shardmill.pipeline.step import Step
from shardmill.pipeline.store import Store
from shardmill.pipeline.task import Artifact, Task
from shardmill.printable import PrintableFormatter, first_line, one_line

log = logging.getLogger("shardmill")

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def execute(task: Callable[..., Task], snakemake: Any) -> None:
    """Does one job.

    The step's function gets the job's named inputs as Paths and its parameters as they are. An input whose receipt
    the job waits for comes as an `Artifact`. The code digest of the result's key is the one that Snakemake recorded.

    Args:
        task: the step's function.
        snakemake: the object that Snakemake gives a script.
    """
    terminal = _redirect_output(Path(snakemake.log[0]))
    own = _step_of(task, snakemake.rule)
    name = f"shardmill {own} {' '.join(map(str, snakemake.wildcards))}".strip()
    _start_logging(terminal, name)
    interrupt.ends_this_process(f"{name}: interrupted", terminal.fileno())
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(snakemake.threads)  # with other threads sums come out otherwise in the last digits
    collect_rarely()
    spare_coremltools()
    build = Path("build") / snakemake.wildcards.model
    withdrawal = partial(_withdraw, build) if own in dag.of_the_model(table.STEPS) else _nothing
    try:
        join_build("build")
        _run(task, table.STEPS[own], snakemake, withdrawal)
        if interrupt.happened():
            raise KeyboardInterrupt  # a library has swallowed it
    except (KeyboardInterrupt, Exception) as error:
        withdrawal()
        log.debug("failed", exc_info=True)  # the log file has the traceback
        if isinstance(error, KeyboardInterrupt) or interrupt.happened():
            log.error("interrupted")
            sys.exit(interrupt.exit_code())
        log.error("%s", described(error, Path(snakemake.log[0])))
        sys.exit(1)
    finally:
        log.debug("peak memory %d MB, declared %s MB", peak_mb(), snakemake.resources.get("mem_mb"))


def _step_of(task: Callable[..., Task], rule: str) -> str:
    """The step that a function describes jobs of; its rule may be called otherwise, where there are several."""
    return next((name for name, step in table.STEPS.items() if step.task is task), rule)


def _run(task: Callable[..., Task], step: Step, snakemake: Any, withdrawal: Callable[[], None]) -> None:
    params = dict(snakemake.params.items())
    root, tools = Path(params.pop("store")), params.pop("tools")
    if "engine" in params:
        params["engine"] = engine()  # of the job's machine, which need not be Snakemake's
    inputs, outputs = _as_files(snakemake.input), _as_files(snakemake.output)
    with storage.room(inputs, outputs, snakemake.wildcards.model) as room:
        record = room.builds / snakemake.wildcards.model / "source.receipt.json"
        if room.is_elsewhere:
            tools = fingerprint.tools(step, fingerprint.family(step, record))
        packages = package_versions(tools["packages"])  # conda may give jobs others than Snakemake has
        tools = tools | {"packages": packages}
        store = Store(root, withdrawal, lambda: _check_code(step, tools["code"], record), remote.configured())
        made = {key: value for key, value in room.outputs.items() if key != dag.BESIDE}
        receipt = made.pop("receipt", None) if step.kept else None
        assert not isinstance(receipt, list)
        arguments = _given(room.inputs) | params
        todo = describe(task, arguments, store, tools, _threads(step, snakemake, room.inputs))
        perform(todo, dag.flat(made), receipt, store, taken(arguments))


def _threads(step: Step, snakemake: Any, inputs: Mapping[str, Any]) -> int:
    """How many the job may start: those that Snakemake gave it, as far as its memory reaches."""
    threads: int = snakemake.threads
    if step.each_thread == memory.NOTHING or threads == 1:
        return threads
    assert isinstance(step.needs, memory.Need)
    found = memory.sizes(load_json(inputs["summary"]), 0, snakemake.wildcards.get("part"))
    return memory.threads_within(snakemake.resources["mem_mb"], threads, step.needs, step.each_thread, found)


def _as_files(named: Any) -> dict[str, Path | list[Path]]:
    """A job's inputs or outputs by name."""
    return {name: as_paths(value) for name, value in named.items()}


def _given(files: Mapping[str, Path | list[Path]]) -> dict[str, Any]:
    """A job's inputs by name: Paths, and Artifacts where the job waits for their receipts."""
    waits = files.get(dag.WAITS, [])
    receipts = {waits} if isinstance(waits, Path) else set(waits)

    def known(path: Path) -> Path | Artifact:
        return read_artifact(path) if receipt_path(path) in receipts else path

    return {
        name: [known(path) for path in value] if isinstance(value, list) else known(value)
        for name, value in files.items()
        if name not in (dag.WAITS, dag.BESIDE)
    }


def _check_code(step: Step, code: str, record: Path) -> None:
    """Raises ShardmillError where the code that worked is not that which the result would be filed under."""
    if fingerprint.tools(step, fingerprint.family(step, record))["code"] != code:
        raise ShardmillError("shardmill's code was changed while it worked; run the same command again")


def _nothing() -> None:
    """What jobs withdraw that model.json does not speak for."""


def peak_mb() -> float:
    """Most memory that this process had resident, in MB, and with it the largest process that it started.

    Linux counts a child's memory from that of its parent at the start, so only a larger child is one of its own.
    """
    whole, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return ((_own_peak() or whole * unit) + (child * unit if child > whole else 0)) / 1e6


def _own_peak() -> int:
    """Most bytes that this program had resident, where /proc tells; else 0.

    ru_maxrss begins with what Snakemake had resident when it started the job. Once it has read a config.json through
    transformers, that is more than a small job ever needs.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _withdraw(build: Path) -> None:
    """Removes what speaks for the whole build: a part of it is being made or judged again, and they come after that."""
    for name in ("model.json", "provenance.json", "test-results.jsonl", "report.html"):
        (build / name).unlink(missing_ok=True)


def as_paths(value: str | Iterable[str]) -> Path | list[Path]:
    """One path or several."""
    return Path(value) if isinstance(value, str) else [Path(item) for item in value]


def described(error: Exception, logfile: Path) -> str:
    """What a person should read, in one line."""
    return one_line(_said(error, logfile))


def _said(error: Exception, logfile: Path) -> str:
    full = full_at(error)
    if full is not None:
        return f"{full}: the disk is full; free some space and run the same command again"
    if isinstance(error, ShardmillError):
        return str(error)
    uncopied = uncopied_at(error)
    if uncopied is not None:
        return f"{uncopied}: the disk is full, or fails; free some space and run the same command again"
    if isinstance(error, OSError) and error.errno in FORBIDDEN and error.filename:
        return f"{error.filename}: {error.strerror}; allow it and run the same command again"
    return f"unexpected {type(error).__name__}: {first_line(error)} (traceback in {logfile})"


def _redirect_output(file: Path) -> TextIO:
    """Sends whatever libraries print to the log file; returns the terminal, for what a person should see."""
    file.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    with open(file, "w") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    return terminal


def _start_logging(terminal: TextIO, job: str) -> None:
    """Everything into the job's log file (which standard error is by now), progress and errors to the terminal too."""
    log.setLevel(logging.DEBUG)
    to_file = logging.StreamHandler()
    to_file.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    to_terminal = logging.StreamHandler(terminal)
    to_terminal.setLevel(logging.INFO)
    to_terminal.setFormatter(logging.Formatter(f"{job}: %(message)s"))
    log.addHandler(to_file)
    log.addHandler(to_terminal)
