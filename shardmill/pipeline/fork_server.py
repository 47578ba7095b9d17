"""Starts jobs as forks of one process that has imported the libraries: importing them is most of a small job's time.

On Linux, Snakemake's main process starts a server beside its jobs, which imports coremltools, torch and transformers
once. A job of a step that uses them asks the server for a fork. The fork does the job and says its exit code; it has
the job's files, folder, environment and signals, and nothing of the server but imported modules. Where no server
answers, the job does its work itself: on a Mac, whose frameworks can't be used in a fork, on the nodes of a cluster,
and until the server has imported. A job that waits imports this module alone, so this module imports little.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from shardmill import interrupt

SOCKET = "SHARDMILL_FORK_SERVER"  # the variable with the path of the server's socket
RULES = "SHARDMILL_FORKED_RULES"  # and the one with the rules whose jobs may be forks
FEWEST = 4  # jobs; the server imports for two of them, and may be ready too late for the first
LIBRARIES = (
    "coremltools",
    "safetensors.torch",
    "shardmill.pipeline.job",
    "snakemake.logging",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
)
POLL = 0.1  # seconds
SIZE = struct.Struct("!Q")
BEGUN, END = b"b", b"e"  # what a fork says before its exit code; what it is told when its job gets SIGTERM


def start(workflow: Any) -> None:
    """Start a server for the jobs of this run of Snakemake, if they run on this machine and are enough.

    The server ends with this process.
    """
    from shardmill.machine import THREAD_VARIABLES, is_portable
    from shardmill.pipeline.made import of_steps
    from shardmill.pipeline.needs import STEPS, step_of

    rules = {rule.name for rule in of_steps(workflow) if STEPS[step_of(rule.name)].forks}
    jobs = [job for job in workflow.dag.needrun_jobs() if job.rule.name in rules]
    local = workflow.local_exec and not (workflow.dryrun or workflow.touch)
    if len(jobs) < FEWEST or not local or not is_portable():
        return
    folder = Path(tempfile.mkdtemp(prefix="shardmill-"))
    os.environ |= {SOCKET: str(folder / "socket"), RULES: " ".join(rules)}
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,  # which ends when this process ends, however it ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Libraries read the number of threads when they are imported.
        env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1"),
    )
    assert server.stdin is not None
    atexit.register(server.stdin.close)  # and is not closed before


def wake() -> None:
    """Let the server import its libraries, because a job has work to do: what the store has needs none of them."""
    if SOCKET in os.environ:
        with suppress(OSError):  # the run has ended
            _wanted(os.environ[SOCKET]).touch()


def _wanted(path: str) -> Path:
    return Path(path).with_name("wanted")


def run(snakemake: Any) -> None:
    """Do a job, Snakemake's object, in a fork of the server or in this process, and end with its exit code."""
    # The server's libraries have one thread.
    if snakemake.threads == 1 and snakemake.rule in os.environ.get(RULES, "").split():
        code = _in_a_fork(snakemake, os.environ[SOCKET])
        if code is not None:
            sys.exit(code)
    _execute(snakemake)


def _execute(snakemake: Any) -> None:
    from shardmill.pipeline.job import execute

    execute(snakemake, wake)


def _in_a_fork(snakemake: Any, path: str) -> int | None:
    """Return the exit code of the fork that did the job, or None if there is no server or it did nothing."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if number == signal.SIGTERM:  # Ctrl-C goes to all processes of a terminal, and SIGTERM often to one
            with suppress(OSError):
                server.sendall(END)

    with socket.socket(socket.AF_UNIX) as server:
        before = [signal.signal(number, forward) for number in interrupt.SIGNALS]
        todo = pickle.dumps((os.getcwd(), dict(os.environ), sys.path, sys.argv, snakemake))
        with suppress(OSError):  # no server, or its end
            server.connect(path)
            socket.send_fds(server, [SIZE.pack(len(todo))], range(3))
            server.sendall(todo)
            if server.recv(1) == BEGUN:
                said = server.recv(1)
                return said[0] if said else 128 + (came[0] if came else signal.SIGKILL)
        for number, handler in zip(interrupt.SIGNALS, before, strict=True):
            signal.signal(number, handler)
        return 128 + came[0] if came else None


def main() -> None:
    """Be the server, and in each fork do its job."""
    for number in interrupt.SIGNALS:  # they are for jobs; the server ends when Snakemake does
        signal.signal(number, signal.SIG_IGN)
    path, server = os.environ[SOCKET], os.getpid()
    try:
        accepted = _serve(path)
    finally:
        if os.getpid() == server:
            shutil.rmtree(Path(path).parent)
    if accepted is None:
        return
    job, snakemake = accepted
    code = 1

    def say() -> None:
        for number in interrupt.SIGNALS:  # who waited is told, ends, and is then taken for gone
            signal.signal(number, signal.SIG_IGN)
        with suppress(OSError):  # nobody waits any longer
            job.sendall(bytes([code]))

    atexit.register(say)  # called after all that the job registers
    try:
        _execute(snakemake)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        raise


def _serve(path: str) -> tuple[socket.socket, Any] | None:
    """Wait for jobs until standard input ends, and return None; in a fork, return the connection and the job."""
    from shardmill.imports import spare_imports

    while not _wanted(path).exists():
        if select.select([sys.stdin], [], [], POLL)[0]:
            return None
    spare_imports()
    for name in LIBRARIES:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork that ended leaves no trace
    gc.freeze()  # the memory that forks share is not written by searches for cycles
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            job, _ = listener.accept()
            # Another thread of this process could hold a lock, which its fork would wait for.
            if len(os.listdir("/proc/self/task")) == 1 and os.fork() == 0:
                listener.close()
                return job, _take_the_place_of(job)
            job.close()
    return None


def _take_the_place_of(job: socket.socket) -> Any:
    """Give this fork the files, folder, environment and signals of the process that waits; return what to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    size, streams, _, _ = socket.recv_fds(job, SIZE.size, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with job.makefile("rb") as sent:
        folder, environment, sys.path, sys.argv, snakemake = pickle.loads(sent.read(*SIZE.unpack(size)))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)

    def watch() -> None:
        while True:
            gone = job.recv(1) != END
            # Who signals a group of processes has signalled this one, too. A signal that comes just before a system
            # call that waits is seen after the call only, so it is sent until it was seen.
            while not interrupt.happened():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(POLL)
            if gone:
                return

    threading.Thread(target=watch, daemon=True).start()
    job.sendall(BEGUN)
    return snakemake


if __name__ == "__main__":
    main()
