"""A built model in a separate process, which can be ended at any time.

coremltools holds the interpreter's lock while Core ML loads, specialises or runs a program (coremltools 9.0,
coremlpython/CoreMLPython.mm:1066-1090: no binding releases it), and a first load takes minutes. In the meantime nothing
else in that process runs: no answer to /health, no spinner, no signal handler. So programs live in a child process. It
receives calls over a socket, one at a time, and returns logits in shared memory. The child ignores Ctrl-C, ends when
the socket closes, and is killed when its parent ends or closes it.
"""

from __future__ import annotations

import mmap
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from math import prod
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from shardmill import interrupt
from shardmill.errors import EngineGoneError, LoadError, ShardmillError
from shardmill.runtime import bundles
from shardmill.runtime.drafter import AssistantEngine, DrafterEngine, load_drafter
from shardmill.runtime.encoder import Encoder, load_encoder
from shardmill.runtime.engine import Engine, load
from shardmill.runtime.kv import Floats
from shardmill.runtime.manifest import ENCODER, holds_encoder, read_manifest
from shardmill.runtime.threads import fastest_threads, seconds_for_passes

MAIN = f"from {__name__} import main; main()"
LOAD_DRAFTER, DRAFTER = "load_drafter", "drafter."  # a call that gives a model the attribute `drafter`, and its path
# What is known here of an object in the child without a call.
ENGINE = ("slots", "vocab", "beyond", "widths", "verify", "pads", "labels")
FACTS = {
    Engine: ENGINE,
    DrafterEngine: (*ENGINE, "ids"),
    AssistantEngine: (),
    Encoder: ("manifest", "labels", "longest"),
}
# Kinds of messages from the child. An array that is SHARED lies in shared memory, and the message has its shape.
LOADING, RESULT, SHARED, FAILED = "loading", "result", "shared", "failed"
PATIENCE = 5.0  # seconds that a child may take to end after its socket has closed


class Process:
    """A child process with a loaded model, whose methods are called by name.

    Attributes:
        threads: see `Remote.threads`.
        model: the class of the model, and its facts.
    """

    def __init__(self, build: Path, precision: str, shared: int = 0) -> None:
        """Start the child and wait until it has loaded the model.

        Args:
            build: folder of a finished build.
            precision: the portable engine's precision, "fp32" or "fp16"; ignored on Core ML.
            shared: bytes of shared memory, which results of this size or less go through.

        Raises:
            ShardmillError: a program can't be loaded, or the child has ended.
        """
        self.build = build
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.truncate(max(shared, 1))
            self.memory = mmap.mmap(file.fileno(), max(shared, 1))
            arguments = [str(theirs.fileno()), str(file.fileno()), str(build), precision]
            self.child = subprocess.Popen(
                [sys.executable, "-c", MAIN, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), file.fileno()),
                process_group=0,  # only the parent handles Ctrl-C
            )
        self.connection, self._calls = Connection(ours.detach()), 0
        self._answered = select.poll()  # made once: a token waits here, and Connection.poll makes one for each wait
        self._answered.register(self.connection, select.POLLIN)
        self.close = weakref.finalize(self, _end, self.child, self.connection)
        interrupt.ends_with_this_process(self.child)
        self.threads: int | None
        self.model: tuple[type, dict[str, Any]]
        self.threads, self.model = self._answer_to(0)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the model; return its result or raise its exception.

        Raises:
            EngineGoneError: the child has ended.
        """
        try:
            with interrupt.deferred():
                self._calls += 1
                self.connection.send((method, arguments))
        except OSError:
            self._gone()
        return self._answer_to(self._calls)

    def _answer_to(self, call: int) -> Any:
        """Return the answer to a call, or raise the exception in the answer; call 0 is the load.

        Ctrl-C may interrupt the wait for an answer. That answer then arrives before the next call's and is skipped.
        """
        while True:
            try:
                self._answered.poll()
                with interrupt.deferred():  # a message that is read only in part would spoil all later ones
                    number, kind, value = self.connection.recv()
            except (EOFError, OSError):
                self._gone()
            if kind == LOADING:
                bundles.report_load(value)
            elif number == call:
                if kind == FAILED:
                    raise value
                return _shared(self.memory, value).copy().T if kind == SHARED else value

    def when_gone(self, told: Callable[[EngineGoneError], None]) -> None:
        """Call `told` in another thread when the child has ended, even if nobody calls a method of the model."""
        child, build = self.child, self.build  # not this object, which would never be closed

        def wait() -> None:
            child.wait()
            told(_gone(child, build))

        threading.Thread(target=wait, name="engine's end", daemon=True).start()

    def _gone(self) -> None:
        """Raise EngineGoneError, naming how the child has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(PATIENCE)
        raise _gone(self.child, self.build)


class Remote:
    """An object in a child process: a model, or the drafter of a model.

    Its facts are attributes here. Its methods run there, called in the same way as the object's own.
    """

    def __init__(self, process: Process, kind: type, facts: Mapping[str, Any], path: str = "") -> None:
        """Store the arguments.

        Args:
            process: the process.
            kind: the object's class.
            facts: the object's attributes that callers read, see FACTS.
            path: leads from the process' model to the object.
        """
        self.process = process
        self._kind, self._path = kind, path
        vars(self).update(facts)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the object, to be called from here."""
        if name.startswith("_") or not callable(getattr(self._kind, name, None)):
            raise AttributeError(f"{self._kind.__name__} has no method {name}, and {name} is none of its facts")
        return partial(self.process.call, f"{self._path}{name}")

    @property
    def threads(self) -> int | None:
        """Return the number of threads of the portable engine; None on Core ML."""
        return self.process.threads

    def load_drafter(self) -> Remote:
        """Load the programs of the build's drafter in the same process, and return the drafter."""
        kind, facts = self.process.call(LOAD_DRAFTER)
        return Remote(self.process, kind, facts, DRAFTER)


def start_engine(build: Path, precision: str) -> Remote:
    """Load a decoder in a separate process, see `Process`; the result is called like an `Engine`."""
    manifest = read_manifest(build)
    process = Process(build, precision, shared=4 * manifest["vocab"] * max(manifest["widths"]))
    return Remote(process, *process.model)


def start_encoder(build: Path, precision: str) -> Remote:
    """Load an encoder in a separate process, see `Process`; the result is called like an `Encoder`."""
    read_manifest(build, ENCODER)  # which refuses the build of a decoder
    process = Process(build, precision)
    return Remote(process, *process.model)


def load_engine(build: Path, precision: str) -> Remote:
    """Do the same as `start_engine`; a terminal shows meanwhile how far the load is."""
    from rich.console import Console

    status = Console(stderr=True).status(f"loading {build}")
    with status, bundles.on_program_load(_progress(build, status.update)):
        return start_engine(build, precision)


def _progress(build: Path, show: Callable[[str], None]) -> Callable[[str], None]:
    """Return a listener for loads that shows the program's number and name, and about how long the rest takes.

    The rest is estimated from the programs before, by their bytes. So nothing is said of it with the first.
    """
    parts = [part for part in read_manifest(build)["parts"] if not part.get("drafter")]
    sizes = {part["name"]: bundles.program_bytes(build, part) for part in parts}
    names, started = [*sizes], list[float]()

    def begins(name: str) -> None:
        if name not in sizes:  # the drafter's, which are loaded later
            return
        started.append(time.perf_counter())
        place = names.index(name)
        done = sum(sizes[each] for each in names[:place])
        left = (started[-1] - started[0]) * (sum(sizes.values()) - done) / done if done else 0.0
        rest = f", about {left:.0f} s left" if left >= 1 else ""
        show(f"loading {build}: [{place + 1}/{len(names)}] {name}{rest}")

    return begins


def main() -> None:
    """Load a model and answer calls until the parent has gone. Arguments: socket, memory, build, precision."""
    from shardmill.imports import quiet_coremltools, spare_imports
    from shardmill.machine import collect_rarely, threads

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle, descriptor, build, precision = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    connection, memory = Connection(handle), mmap.mmap(descriptor, 0)
    collect_rarely()
    spare_imports()
    with suppress(EOFError, OSError):  # the parent has gone
        try:
            with quiet_coremltools(), bundles.on_program_load(lambda name: connection.send((0, LOADING, name))):
                model: Any = load_encoder(build, precision) if holds_encoder(build) else load(build, precision)
                if isinstance(model, Engine):
                    fastest_threads(partial(seconds_for_passes, model))
        except Exception as error:
            connection.send((0, FAILED, _portrait(error.of(build) if isinstance(error, LoadError) else error)))
            return
        connection.send((0, RESULT, (threads(), _facts(model))))
        for number in count(1):
            method, arguments = connection.recv()
            connection.send((number, *_answer(model, method, arguments, memory)))


def _answer(model: Any, method: str, arguments: Sequence[Any], memory: mmap.mmap) -> tuple[str, Any]:
    """Call a method of the model and return the message with its result or exception."""
    try:
        if method == LOAD_DRAFTER:
            model.drafter = load_drafter(model)
            return RESULT, _facts(model.drafter)
        value = attrgetter(method)(model)(*arguments)
    except Exception as error:
        return FAILED, _portrait(error)
    if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.nbytes <= len(memory):
        rows = value.T  # as an engine lays out logits [T, rows]
        np.copyto(_shared(memory, rows.shape), rows)
        return SHARED, rows.shape
    return RESULT, value


def _facts(model: Any) -> tuple[type, dict[str, Any]]:
    """Return an object's class, and what callers read of it without a call."""
    return type(model), {name: getattr(model, name) for name in FACTS[type(model)]}


def _portrait(error: Exception) -> Exception:
    """Return an error that can be sent: a ShardmillError unchanged, any other with its traceback as a note."""
    if not isinstance(error, ShardmillError):
        error.add_note("".join(traceback.format_exception(error)))
    return error


def _shared(memory: mmap.mmap, shape: Sequence[int]) -> Floats:
    """Return shared memory as an array."""
    return np.frombuffer(memory, np.float32, prod(shape)).reshape(shape)


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


def _gone(child: subprocess.Popen[bytes], build: Path) -> EngineGoneError:
    """Return an error that names how a child has ended."""
    code = child.returncode
    how = "does not answer" if code is None else f"ended with {_named(code)}"
    return EngineGoneError(f"the process that runs the programs of {build} {how}; start the command again")


def _named(code: int) -> str:
    """Return an exit code in words, a signal by its name."""
    with suppress(ValueError):
        return str(signal.Signals(-code).name) if code < 0 else f"exit code {code}"
    return f"signal {-code}"


def _end(child: subprocess.Popen[bytes], connection: Connection) -> None:
    """Kill the child: it has nothing to save, and a call into Core ML would not end on a gentler signal."""
    connection.close()
    child.kill()
    child.wait()
