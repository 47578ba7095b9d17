"""What a build prints in place of Snakemake's blocks: when a job begins, when it ends, what it found, what is left.

The main process alone prints. A job writes what it has to say into its log, where this module reads it, so that lines
never mix. What Snakemake says itself goes on into its own log, in .snakemake/log. It says all of it on the terminal as
well if it is asked with `--verbose`, or with another option on its output; a dry run, `--touch` and `--report` are
Snakemake's own throughout. Where Snakemake's handler for the terminal is not found, nothing is taken over.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from shardmill.pipeline import storage
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.found import closing, found
from shardmill.pipeline.job import SILENT
from shardmill.pipeline.made import of_steps
from shardmill.pipeline.needs import step_of
from shardmill.pipeline.rest import Rest
from shardmill.pipeline.words import about, clock, duration
from shardmill.printable import printable

LOGGER, STREAM = "snakemake.logging", "DefaultStreamHandler"  # Snakemake's logger, and its handler for the terminal
REDRAWN = 1.0  # seconds between two looks at the logs of running jobs
LINE = re.compile(r"^(INFO|WARNING|ERROR) (.+)$")  # in a job's log: what a person is told
WORKED, UNCHANGED, FIRST = "worked: ", "unchanged", "not made before"
INTERRUPTED = "interrupted"
# What Snakemake says.
LOCAL = "Assuming unrestricted shared filesystem usage"
STARTED, NOTHING = "Building DAG of jobs", "Nothing to be done"
KILLED, STOPPING = "Terminating processes on user request", "Will exit after finishing"
CANCELLED = "Cancelling snakemake on user request"
FOLLOWS = ("Exiting because a job execution failed", "At least one job did not complete", "CalledProcessError")
GO_ON = "the same command goes on from there"
CPU = re.compile(r"^DEBUG (\S+) s of CPU$", re.MULTILINE)  # in a job's log
LONG = 30.0  # seconds of a job whose usual time is said when it begins
LONGEST = 1000  # characters of what a job says


def take_over(batch: Batch, workflow: Any) -> None:
    """Let this run of Snakemake, if it builds, print what this module prints; called while the Snakefile is read."""
    asked, logger = workflow.output_settings, logging.getLogger(LOGGER)
    theirs = next((handler for handler in logger.handlers if handler.name == STREAM), None)
    detailed = asked.verbose or asked.quiet or asked.debug_dag or asked.printshellcmds
    if theirs is None or detailed or asked.dryrun or not workflow.is_main_process:
        return
    logger.addHandler(Terminal(batch, workflow, theirs))
    logger.removeHandler(theirs)


def end(batch: Batch | None = None) -> None:
    """Draw nothing more; say what a run that has succeeded has made, given its models."""
    lines = [*(closing(batch) if batch else ())]
    terminals = [handler for handler in logging.getLogger(LOGGER).handlers if isinstance(handler, Terminal)]
    for handler in terminals:
        handler.end(lines)
    if not terminals:
        for line in lines:
            print(line, file=sys.stderr)


@dataclass
class Running:
    """A job that runs.

    Attributes:
        name: for people: its step and part, after its model if the run builds several.
        job: Snakemake's.
        begun: time.monotonic() of its beginning.
        at: the same as time.time(), which files' times are compared with.
        read: bytes of its log that were read.
        lines: what its log tells people, each line with its kind.
        said: the last one of them on how far it is.
    """

    name: str
    job: Any
    begun: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)
    read: int = 0
    lines: list[tuple[str, str]] = field(default_factory=list)
    said: str = ""

    @property
    def log(self) -> Path:
        """Return the path of its log."""
        return Path(str(self.job.log[0]))

    @property
    def seconds(self) -> float:
        """Return how long it has run."""
        return time.monotonic() - self.begun

    @property
    def told(self) -> str:
        """Return its name, how long it has run, and how far it says that it is."""
        return f"{self.name} ({duration(self.seconds)}{', ' * bool(self.said)}{self.said})"

    @property
    def worked(self) -> bool:
        """Return whether there was work to do: its result was not in the store."""
        return any(text.startswith(WORKED) for _, text in self.lines)

    def cpu(self) -> float | None:
        """Return the CPU time that it says it took, in seconds."""
        with suppress(OSError, IndexError, ValueError):
            return float(CPU.findall(self.log.read_text(encoding="utf-8", errors="replace"))[-1])
        return None

    def news(self) -> list[tuple[str, str]]:
        """Return each line for people that its log has got since the last call."""
        lines: list[str] = []
        with suppress(OSError):  # not begun, or on another machine
            if self.log.stat().st_mtime >= self.at - 2:  # not an earlier run's; file systems round times
                with self.log.open("rb") as stream:
                    stream.seek(self.read)
                    whole, end, _ = stream.read().rpartition(b"\n")
                self.read += len(whole) + len(end)
                lines = whole.decode("utf-8", "replace").splitlines()
        fresh = [(line[1], printable(line[2], LONGEST)) for line in map(LINE.match, lines) if line]
        self.lines += fresh
        return fresh


class Terminal(logging.Handler):
    """Takes Snakemake's records in place of its handler for the terminal, see the module.

    Args:
        batch: the models of the run.
        workflow: Snakemake's.
        theirs: the handler whose place this one takes; it comes back for a run that makes nothing.
    """

    def __init__(self, batch: Batch, workflow: Any, theirs: logging.Handler) -> None:
        super().__init__()
        self.batch, self.workflow, self.theirs = batch, workflow, theirs
        self.stream: TextIO = theirs.stream  # type: ignore[attr-defined]
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.jobs: dict[int, Any] = {}
        self.running: dict[int, Running] = {}
        self.begun, self.total, self.ended = time.monotonic(), 0, set[int]()
        self.rest, self.told_rest = Rest(batch, workflow), ""
        self.failures, self.said_since = list[str](), False  # of jobs; whether a line has followed the last one
        self.killed = list[str]()  # jobs that ended without a word
        self.alone = True  # whether jobs write into their logs alone
        self.builds, self.failed, self.interrupted, self.drawn = False, False, False, False
        self.over = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Print what a person should know of a record of Snakemake's; if that fails, let Snakemake say it all again."""
        try:
            self._take(record)
        except Exception as error:
            self._give_back()
            why = f"{type(error).__name__}: {error}"
            logging.getLogger(LOGGER).warning(f"shardmill can't say how the build is doing ({why})")
            self.theirs.handle(record)

    def _take(self, record: logging.LogRecord) -> None:
        kind, text = str(getattr(record, "event", None) or ""), record.getMessage()
        self.builds = self.builds or kind == "workflow_started" or text.startswith(LOCAL)
        if not self.builds:
            self.theirs.handle(record)
        elif kind == "job_info":
            self._begins(record.jobid)  # type: ignore[attr-defined]
        elif kind == "job_finished":
            self._ends(record.job_id)  # type: ignore[attr-defined]
        elif kind == "job_error":
            self._fails(record.jobid)  # type: ignore[attr-defined]
        elif text.startswith(STARTED) and self.workflow.touch:
            self._give_back()
            self.theirs.handle(record)
        elif text.startswith(NOTHING):
            self._say("shardmill: Nothing to be done", *closing(self.batch))
        elif text.startswith((KILLED, CANCELLED)):
            self._interrupt(f"shardmill: interrupted; {GO_ON}")
        elif text.startswith(STOPPING):
            self._interrupt(f"shardmill: stops when the running jobs have ended; {GO_ON}")
        elif record.levelno >= logging.WARNING and not self._follows(kind, text):
            self._say(text)

    def _follows(self, kind: str, text: str) -> bool:
        """Return whether a record only says that a job has failed, which this module says in its own line."""
        return kind == "group_error" or any(word in text for word in FOLLOWS)

    def end(self, lines: Sequence[str]) -> None:
        """Print the last lines, with failures that others have followed, and draw nothing more."""
        self.over.set()
        self.rest.keep()
        with self.lock:  # type: ignore[union-attr]
            killed = () if self.interrupted else self.killed
            self._say(*lines, *(self.failures if self.said_since else ()), *killed)
            self.said_since, self.killed = False, []

    def close(self) -> None:
        """Leave the terminal as it is to be."""
        self.end(())
        super().close()

    def _give_back(self) -> None:
        self.over.set()
        os.environ.pop(SILENT, None)
        logger = logging.getLogger(LOGGER)
        logger.addHandler(self.theirs)
        logger.removeHandler(self)

    def _interrupt(self, line: str) -> None:
        if not self.interrupted:
            self.interrupted = True
            self._say(line)

    def _plan(self) -> None:
        """Find out, before the first job, what will run; say so, and let jobs write into their logs alone."""
        workflow, rules = self.workflow, {rule.name for rule in of_steps(self.workflow)}
        self.jobs = {workflow.dag.jobid(job): job for job in workflow.dag.needrun_jobs() if job.rule.name in rules}
        self.total = len(self.jobs)
        self.alone = workflow.local_exec and not storage.is_used(workflow)
        if self.alone:
            os.environ[SILENT] = "1"
        models = ", ".join(self.batch.models) if len(self.batch.models) < 4 else f"{len(self.batch.models)} models"
        left = self._left()
        jobs = f"{self.total} job{'s' * (self.total > 1)}"
        self._say(f"shardmill: {models}: {jobs}{left}; Ctrl-C stops the build, and {GO_ON}")
        threading.Thread(target=self._watch, daemon=True).start()

    def _called(self, job: Any) -> str:
        named = dict(job.wildcards_dict)
        model = named.pop("model", "")
        return " ".join([*([model] if self.batch.listed else []), step_of(job.rule.name), *map(str, named.values())])

    def _begins(self, number: int) -> None:
        if not self.total:
            self._plan()
        if number in self.jobs:
            job = self.running[number] = Running(self._called(self.jobs[number]), self.jobs[number])
            if not self.live:
                seconds = self.rest.seconds(job.job) or 0.0
                usual = f", usually {about(seconds)}" if seconds >= LONG else ""
                self._report(job, f"begins{usual}" if self.workflow.local_exec else "submitted")

    def _ends(self, number: int) -> None:
        job = self.running.pop(number, None)
        if job is None:
            return
        self.ended.add(number)
        self._tell(job, ended=True)
        reason = next((text.removeprefix(WORKED) for _, text in job.lines if text.startswith(WORKED)), FIRST)
        parts = [found(step_of(job.job.rule.name), job.job.output)]
        parts += [UNCHANGED] if ("INFO", UNCHANGED) in job.lines else []
        parts += [f"because of {reason}"] if reason != FIRST else []
        self.rest.learn(job.job, job.seconds, job.cpu() if job.worked else None)
        left = self._left()
        told = left if left != self.told_rest and not self.live else ""
        self.told_rest = left
        self._report(job, f"{'; '.join([*filter(None, parts), duration(job.seconds)])}{told}")

    def _left(self) -> str:
        run = {number: job.seconds for number, job in self.running.items()}
        return self.rest.words((self.jobs[n], run.get(n, 0.0)) for n in self.jobs if n not in self.ended)

    def _fails(self, number: int) -> None:
        job = self.running.pop(number, None)
        self.failed = True
        if job is None:
            return  # a config that can't be built, which has said so
        self._tell(job, ended=True)
        errors = [text for kind, text in job.lines if kind == "ERROR"]
        if errors and errors[-1] == INTERRUPTED:
            self._interrupt(f"shardmill: interrupted; {GO_ON}")
        elif not self.interrupted and (self.alone or not self.workflow.local_exec):  # or else it has said so itself
            words = " ".join(["shardmill", step_of(job.job.rule.name), *map(str, job.job.wildcards_dict.values())])
            if not errors:  # it was killed, perhaps by the Ctrl-C of which Snakemake is still to tell
                self.killed.append(f"{words}: ended without a word; see {job.log}, and whether the memory was full")
                return
            self.failures.append(f"{words}: {errors[-1]}")
            self._say(self.failures[-1])
            self.said_since = False

    def _tell(self, job: Running, ended: bool = False) -> None:
        """Print what a job's log says that is news; of a job that has ended, warnings alone."""
        for kind, text in job.news():
            if kind == "WARNING":
                self._say(f"shardmill {job.name}: {text}")
            elif kind == "INFO" and not ended and text != UNCHANGED and not text.startswith(WORKED):
                job.said = text
                if not self.live:
                    self._report(job, text)

    def _report(self, job: Running, text: str) -> None:
        self._say(f"{clock(time.monotonic() - self.begun)} {self._share()} {job.name}: {text}")
        self.said_since = True

    def _share(self) -> str:
        return f"[{len(self.ended):>{len(str(self.total))}}/{self.total}]"

    def _watch(self) -> None:
        """Look at the logs of running jobs again and again, and redraw the last line of a terminal."""
        while not self.over.wait(REDRAWN):
            with self.lock:  # type: ignore[union-attr]
                for job in self.running.values():
                    self._tell(job)
                self._draw()

    def _draw(self) -> None:
        """Draw the line of what runs, below all others."""
        if self.live and not self.over.is_set():
            what = ", ".join(job.told for job in self.running.values())
            text = f"{self._share()}{self._left().removeprefix(';')}: {what}"
            width = shutil.get_terminal_size().columns - 1
            self._clear()
            self.stream.write(text if len(text) <= width else f"{text[: width - 3]}...")
            self.stream.flush()
            self.drawn = True

    def _clear(self) -> None:
        if self.drawn:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()
            self.drawn = False

    def _say(self, *lines: str) -> None:
        self._clear()
        with suppress(OSError):  # a pipe whose reader has gone
            self.stream.write("".join(f"{line}\n" for line in lines))
            self.stream.flush()
