"""Runs a step as a Snakemake job: names become Paths, errors become one line, everything is logged."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from shardmill import interrupt
from shardmill.errors import GateError, ShardmillError
from shardmill.evidence.folder import heed_limits
from shardmill.files import digest, load_json, read_json, write_json
from shardmill.imports import spare_imports
from shardmill.machine import THREAD_VARIABLES, collect_rarely, engine, is_portable
from shardmill.pipeline import code_digest, resources, storage
from shardmill.pipeline.cache import remote
from shardmill.pipeline.cache.lock import join_build
from shardmill.pipeline.cache.store import TEMPLATES, Store
from shardmill.pipeline.needs import STEPS, Step, step_of
from shardmill.pipeline.task import Artifact, Task, Tools
from shardmill.pipeline.verdict import Missed, failed
from shardmill.pipeline.words import size
from shardmill.printable import PrintableFormatter, first_line, one_line
from shardmill.records.names import RECEIPT

# Names in rules.
OWN = "receipt"  # the output that a job itself writes, beside a result that the store keeps
WAITS = "waits"  # the input with the receipts for which a job waits
BESIDE = "beside"  # the input or output that a job reaches through another file: files named in a record or model.json


def _receipt_path(artifact: Path) -> Path:
    """Return the path of an artifact's receipt, which stands beside the artifact."""
    return artifact.with_name(artifact.stem + RECEIPT)


def read_artifact(path: Path) -> Artifact:
    """Return the artifact at `path`, which is its step's only output."""
    receipt = read_json(_receipt_path(path))
    ((name, sha256),) = receipt["outputs"].items()
    return Artifact(path, sha256, receipt["files"].get(name, {}))


def describe(
    task: Callable[..., Task], arguments: Mapping[str, Any], store: Store, tools: Tools, threads: int = 1
) -> Task:
    """Return a step's description of a job.

    Args:
        task: the step's function.
        arguments: the job's inputs and parameters by name; the function must have a parameter for every name.
        store: gives `hashes`, `before_change` and `templates`, for functions with parameters of that name. `templates`
            is a folder for files that all parts share, named by the tools' digest.
        tools: the step's code and packages, for functions with a parameter `tools`.
        threads: how many threads the job may start, for functions with a parameter `threads`.
    """
    offers = {
        "tools": tools,
        "threads": threads,
        "hashes": store.hashes,
        "before_change": store.before_change,
        "templates": store.root / TEMPLATES / digest(tools),
    }
    asked = inspect.signature(task).parameters
    return task(**arguments, **{name: value for name, value in offers.items() if name in asked})


def taken(arguments: Mapping[str, Any]) -> dict[Path, Path]:
    """Return the artifacts among a job's arguments, with their receipts."""
    values = [each for value in arguments.values() for each in (value if isinstance(value, list) else [value])]
    return {value.path: _receipt_path(value.path) for value in values if isinstance(value, Artifact)}


def perform(
    task: Task,
    outputs: Mapping[str, Path],
    receipt: Path | None,
    store: Store,
    reads: Mapping[Path, Path] | None = None,
    begins: Callable[[], None] = lambda: None,
) -> bool:
    """Do a job's work, or take its result from the store; True if that took work.

    Args:
        task: the step's description of the job.
        outputs: the path of each output, by name.
        receipt: where to write the receipt; None for work whose result is not kept.
        store: where results are kept.
        reads: artifacts that the work reads, with their receipts; the action has the hashes from these receipts.
        begins: called before the work, if there is any.

    Raises:
        GateError: a gate's number missed its threshold; every number is in the file beside the verdict.
    """

    def work(made: Mapping[str, Path]) -> None:
        begins()
        task.work(made)

    if task.action is None or receipt is None:
        work(outputs)
        return True
    if "verdict" in outputs:
        failed(outputs["verdict"]).unlink(missing_ok=True)
    try:
        return store.perform(task.action, outputs, receipt, work, reads, **task.notes)
    except Missed as missed:
        numbers = failed(outputs["verdict"])
        write_json(numbers, {**missed.content, "missed": str(missed), "inputs": task.action.inputs})
        raise GateError(f"{missed}; all numbers: {numbers}") from None


CODES = (errno.ENOSPC, errno.EDQUOT)
# The second text for each code is Rust's, as safetensors reports it.
SIGNS = tuple(sign for code in CODES for sign in (os.strerror(code), f"os error {code})"))
UNCOPIED = re.compile(rf"filesystem error: cannot copy: {re.escape(os.strerror(errno.EIO))} \[[^]]*\] \[([^]]*)\]")
SOMEWHERE = "build"


def full_at(error: BaseException) -> str | None:
    """Return the path that could not be written because the disk is full, "build" if the error names no path.

    None for another error.
    """
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno in CODES:
            return str(cause.filename2 or cause.filename or SOMEWHERE)
        if any(sign in str(cause) for sign in SIGNS):
            return _copied_to(cause) or SOMEWHERE
    return None


def uncopied_at(error: BaseException) -> str | None:
    """Return the path that a C++ library could not write; None for another error.

    The C++ standard library reports a full disk and a failing disk as the same I/O error, so no more is known.
    """
    match = next((match for each in chain(error) if (match := UNCOPIED.search(str(each)))), None)
    return match and match[1]


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its cause or context, and so on."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        yield following
        seen.append(following)
        following = following.__cause__ or following.__context__


def _copied_to(error: BaseException) -> str | None:
    """Return the first file that shutil.copytree failed to write: its error lists (source, target, reason) tuples."""
    first = error.args[0][0] if error.args and isinstance(error.args[0], list) and error.args[0] else None
    return str(first[1]) if isinstance(first, tuple) and len(first) == 3 else None


log = logging.getLogger("shardmill")

SILENT = "SHARDMILL_JOBS_ARE_SILENT"  # the variable with which a job writes into its log alone: see terminal.py
STORE = Path("build/.store")
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def execute(snakemake: Any, begins: Callable[[], None] = lambda: None) -> None:
    """Do one job.

    The step has the rule's name. Its function gets the job's named inputs as Paths and its parameters unchanged. If the
    job waits for the receipt of an input, the function gets this input as an `Artifact`. The code digest in the key is
    the one that Snakemake recorded. If the store keeps the result, the rule has an output `receipt`.

    Args:
        snakemake: the object that Snakemake gives a script.
        begins: called before the work, if the store does not have its result.
    """
    terminal = _redirect_output(Path(snakemake.log[0]))
    silent = SILENT in os.environ
    step = step_of(snakemake.rule)
    name = f"shardmill {step} {' '.join(map(str, snakemake.wildcards))}".strip()
    _start_logging(None if silent else terminal, name)
    interrupt.ends_this_process(f"{name}: interrupted", 2 if silent else terminal.fileno())
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(snakemake.threads)  # sums differ in the last digits if threads differ
    collect_rarely()
    spare_imports(torch=not STEPS[step].needs.torch)
    build = Path("build") / snakemake.wildcards.model
    withdrawal = _nothing if snakemake.params.get("aside") else partial(_withdraw, build)
    try:
        heed_limits()
        join_build("build")
        _run(STEPS[step], snakemake, withdrawal, begins)
        if interrupt.happened():
            raise KeyboardInterrupt  # a library has swallowed the interrupt
    except (KeyboardInterrupt, Exception) as error:
        withdrawal()
        log.debug("failed", exc_info=True)  # the log file has the traceback
        if isinstance(error, KeyboardInterrupt) or interrupt.happened():
            log.error("interrupted")
            sys.exit(interrupt.exit_code())
        log.error("%s", error_line(error, Path(snakemake.log[0])))
        sys.exit(1)
    finally:
        log.debug("peak memory %d MB, declared %s MB", peak_mb(), snakemake.resources.get("mem_mb"))
        log.debug("%.2f s of CPU", cpu_seconds())


def _run(step: Step, snakemake: Any, withdrawal: Callable[[], None], begins: Callable[[], None]) -> None:
    params = dict(snakemake.params.items())
    tools, _ = params.pop("tools"), params.pop("aside", False)
    if "engine" in params:
        params["engine"] = engine()  # of the job's machine, which may not be Snakemake's
    inputs, outputs = as_files(snakemake.input), as_files(snakemake.output)
    with storage.room(inputs, outputs, snakemake.wildcards.model) as room:
        record = room.builds / snakemake.wildcards.model / code_digest.RECORD
        if room.is_elsewhere:
            tools = code_digest.tools(step, code_digest.family_of(step, record))
        tools = tools | {"packages": code_digest.versions(step)}  # a node of a cluster may have others than Snakemake's
        store = Store(STORE, withdrawal, lambda: _check_code(step, tools["code"], record), remote.configured())
        made = {key: value for key, value in room.outputs.items() if key != BESIDE}
        receipt = made.pop(OWN, None)
        assert not isinstance(receipt, list)
        arguments = given(room.inputs) | params
        todo = describe(step.task, arguments, store, tools, _threads(step, snakemake, room.inputs))
        with _saying_loads(room.builds / snakemake.wildcards.model):
            perform(todo, flat(made), receipt, store, taken(arguments), begins)


@contextmanager
def _saying_loads(build: Path) -> Iterator[None]:
    """Log each load of a program by Core ML inside the `with` block: it may take minutes, and says nothing."""
    if is_portable():
        yield
        return
    from shardmill.runtime.bundles import on_program_load

    def say(name: str) -> None:
        files = (build / "compiled" / f"{name}.mlmodelc").rglob("*")
        total = sum(file.stat().st_size for file in files if file.is_file())
        log.info("Core ML loads %s, %s; a first load takes minutes for a gigabyte", name, size(total))

    with on_program_load(say):
        yield


def _threads(step: Step, snakemake: Any, inputs: Mapping[str, Any]) -> int:
    """Return how many threads the job may start: as many as Snakemake gave it, or fewer if its memory is short."""
    threads: int = snakemake.threads
    if step.each_thread == resources.NOTHING or threads == 1:
        return threads
    sizes = resources.job_sizes(load_json(inputs["summary"]), 0, snakemake.wildcards.get("part"))
    need = resources.on_this_machine(step.needs)
    return resources.threads_within(snakemake.resources["mem_mb"], threads, need, step.each_thread, sizes)


def as_files(named: Any) -> dict[str, Path | list[Path]]:
    """Return a job's inputs or outputs by name."""
    return {name: as_paths(value) for name, value in named.items()}


def flat(files: Mapping[str, Path | list[Path]]) -> dict[str, Path]:
    """Return outputs by name, and the files of a list by their stems."""
    by_name: dict[str, Path] = {}
    for name, paths in files.items():
        by_name |= {path.stem: path for path in paths} if isinstance(paths, list) else {name: paths}
    return by_name


def given(files: Mapping[str, Path | list[Path]]) -> dict[str, Any]:
    """Return a job's inputs by name: Artifacts if the job waits for their receipts, otherwise Paths."""
    waits = files.get(WAITS, [])
    receipts = {waits} if isinstance(waits, Path) else set(waits)

    def known(path: Path) -> Path | Artifact:
        return read_artifact(path) if _receipt_path(path) in receipts else path

    return {
        name: [known(path) for path in value] if isinstance(value, list) else known(value)
        for name, value in files.items()
        if name not in (WAITS, BESIDE)
    }


def _check_code(step: Step, code: str, record: Path) -> None:
    """Raise ShardmillError if shardmill's code no longer has the digest that the result's key would contain."""
    if code_digest.tools(step, code_digest.family_of(step, record))["code"] != code:
        raise ShardmillError("shardmill's code was changed while it worked; run the same command again")


def _nothing() -> None:
    """Withdraw nothing: the job's result is not covered by model.json."""


def peak_mb() -> float:
    """Return this process's peak resident memory in MB, plus the peak of the largest process that it started.

    On Linux a child's peak starts at its parent's memory. So a child counts only if its peak is above the parent's.
    """
    whole, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (resources.own_peak() + (child * resources.RSS_UNIT if child > whole else 0)) / 1e6


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _withdraw(build: Path) -> None:
    """Remove the files that describe the whole build, because a part of the build is being made or judged again."""
    for name in ("model.json", "provenance.json", "test-results.jsonl", "report.html"):
        (build / name).unlink(missing_ok=True)


def as_paths(value: str | Iterable[str]) -> Path | list[Path]:
    """Return one path or several."""
    return Path(value) if isinstance(value, str) else [Path(item) for item in value]


def error_line(error: Exception, logfile: Path) -> str:
    """Return the error message for a person, in one line."""
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
    """Send the output of all libraries to the log file; return the terminal, for messages to a person."""
    file.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    with open(file, "w") as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    return terminal


def _start_logging(terminal: TextIO | None, job: str) -> None:
    """Log everything to standard error, now the job's log file; log progress and errors to a terminal, too."""
    log.setLevel(logging.DEBUG)
    to_file = logging.StreamHandler()
    to_file.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    log.addHandler(to_file)
    if terminal:
        to_terminal = logging.StreamHandler(terminal)
        to_terminal.setLevel(logging.INFO)
        to_terminal.setFormatter(logging.Formatter(f"{job}: %(message)s"))
        log.addHandler(to_terminal)
