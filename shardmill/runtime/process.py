"""A built model in a separate process, which can be ended at any time.

coremltools holds the interpreter's lock while Core ML loads, specialises or runs a program (coremltools 9.0,
coremlpython/CoreMLPython.mm:1066-1090: no binding releases it), and a first load takes minutes. In the meantime nothing
else in that process runs: no answer to /health, no spinner, no signal handler. So programs live in a child process. It
receives calls over a socket, one at a time, and returns logits in shared memory. The child ignores Ctrl-C, ends when
the socket closes, and is killed when its parent ends or closes it.
"""

from __future__ import annotations

import mmap
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from shardmill import interrupt
from shardmill.errors import EngineGoneError, LoadError, ShardmillError
from shardmill.models.host import Floats, bucket_for
from shardmill.runtime import bundles
from shardmill.runtime.drafter import drafted_tokens, load_drafter
from shardmill.runtime.encoder import load_encoder
from shardmill.runtime.engine import Engine, load
from shardmill.runtime.manifest import ENCODER, folds_blocks, holds_encoder, label_tokens, read_manifest, verify_width
from shardmill.runtime.threads import fastest_threads, seconds_for_passes

MAIN = f"from {__name__} import main; main()"
LOAD_DRAFTER = "load_drafter"  # a call that gives a model the attribute `drafter`
LOADING, RESULT, FAILED = "loading", "result", "failed"  # kinds of messages from the child
PATIENCE = 5.0  # seconds that a child may take to end after its socket has closed


class Process:
    """A child process with a loaded model, whose methods are called by name.

    Attributes:
        threads: number of threads of the portable engine; None on Core ML.
    """

    def __init__(self, build: Path, precision: str, shared: int = 0) -> None:
        """Start the child and wait until it has loaded the model.

        Args:
            build: folder of a finished build.
            precision: the portable engine's precision, "fp32" or "fp16"; ignored on Core ML.
            shared: bytes of shared memory for logits.

        Raises:
            ShardmillError: a program can't be loaded, or the child has ended.
        """
        self.build = build
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.truncate(max(shared, 1))
            self.memory = mmap.mmap(file.fileno(), max(shared, 1))
            given = [str(theirs.fileno()), str(file.fileno()), str(build), precision]
            self.child = subprocess.Popen(
                [sys.executable, "-c", MAIN, *given],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), file.fileno()),
                process_group=0,  # only the parent handles Ctrl-C
            )
        self.connection, self._calls = Connection(ours.detach()), 0
        self.close = weakref.finalize(self, _end, self.child, self.connection)
        interrupt.ends_with_this_process(self.child)
        self.threads: int | None = self._answer_to(0)

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
                self.connection.poll(None)
                with interrupt.deferred():  # a message that is read only in part would spoil all later ones
                    number, kind, value = self.connection.recv()
            except (EOFError, OSError):
                self._gone()
            if kind == LOADING:
                bundles.report_load(value)
            elif number == call:
                if kind == FAILED:
                    raise value
                return value

    def _gone(self) -> None:
        """Raise EngineGoneError, naming how the child has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(PATIENCE)
        code = self.child.returncode
        how = "does not answer" if code is None else f"ended with {_named(code)}"
        raise EngineGoneError(f"the process that runs the programs of {self.build} {how}; start the command again")


class EngineProcess(Process):
    """A decoder in a separate process; implements the protocol of shardmill.decode.engine."""

    def __init__(self, build: Path, precision: str) -> None:
        """Load the model of a build; see `Process`."""
        manifest = read_manifest(build)
        self.slots: int = manifest["context"]
        self.vocab: int = manifest["vocab"]
        self.widths: tuple[int, ...] = tuple(manifest["widths"])
        self.verify, self.pads = verify_width(manifest), folds_blocks(manifest)
        self.labels = label_tokens(manifest)
        self.lends = "lent" in manifest.get("drafter", {})  # to an assistant
        self.drafted = drafted_tokens(manifest) if "drafter" in manifest else np.arange(0)
        super().__init__(build, precision, shared=_logit_bytes(manifest))

    def load_drafter(self) -> DrafterProcess | AssistantProcess:
        """Load the programs of the build's drafter in the same process, and return the drafter."""
        self.call(LOAD_DRAFTER)
        return AssistantProcess(self) if self.lends else DrafterProcess(self)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """Write each token's key and value into its slot and return float32 logits [T, vocab]."""
        return self.logits("forward", self.vocab, tokens, slots, positions)

    def logits(
        self, method: str, rows: int, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> Floats:
        """Call a method that returns logits, and return the logits [T, rows], which come through shared memory."""
        self.call(method, list(tokens), list(slots), list(positions))
        return _logits(self.memory, rows, len(tokens)).copy().T

    def forward_labels(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """See `Engine.forward_labels`; so few logits come with the answer."""
        logits: Floats = self.call("forward_labels", list(tokens), list(slots), list(positions))
        return logits

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """Do the same as `forward` without running the LM head."""
        self.call("write", list(tokens), list(slots), list(positions))

    def adapt(self, name: str | None) -> str:
        """See `Engine.adapt`."""
        weights: str = self.call("adapt", name)
        return weights

    def renew(self) -> None:
        """See `Engine.renew`."""
        self.call("renew")

    def reset(self) -> None:
        """Forget every slot."""
        self.call("reset")

    def fit(self, slots: int) -> None:
        """Move to the shortest context of at least `slots` slots; the contents of slots beyond it are forgotten."""
        self.call("fit", slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Hide slots until they are written again."""
        self.call("forget", list(slots))

    def copy_bytes(self) -> tuple[int, int]:
        """Return the bytes of copies, see `Engine.copy_bytes`."""
        rows, rest = self.call("copy_bytes")
        return rows, rest

    def copy_out(self, spans: Mapping[int, tuple[int, int]], rest: int | None = None) -> dict[int, int]:
        """Copy what the programs keep, see `Engine.copy_out`; the copies stay in the process."""
        found: dict[int, int] = self.call("copy_out", dict(spans), rest)
        return found

    def copy_in(self, keys: Sequence[int]) -> None:
        """Write copies back; see `Engine.copy_in`."""
        self.call("copy_in", list(keys))

    def drop_copies(self, keys: Sequence[int]) -> None:
        """Free copies."""
        self.call("drop_copies", list(keys))

    def save_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> None:
        """Write copies to a file; see `Engine.save_copies`."""
        self.call("save_copies", list(keys), file, list(tokens))

    def load_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> dict[int, int]:
        """Read copies from a file; see `Engine.load_copies`."""
        found: dict[int, int] = self.call("load_copies", list(keys), file, list(tokens))
        return found

    def rewindable(self, position: int) -> bool:
        """Return whether the next pass may start at an earlier position, or at the end."""
        return bool(self.call("rewindable", position))

    def undoable(self, position: int) -> int | None:
        """Return how many tokens can be undone, see `Engine.undoable`."""
        most: int | None = self.call("undoable", position)
        return most


class DrafterProcess:
    """The drafter of a decoder in a separate process; see `DrafterEngine`."""

    def __init__(self, model: EngineProcess) -> None:
        self.model, self.ids = model, model.drafted
        self.slots, self.vocab, self.widths, self.verify = model.slots, model.vocab, model.widths, model.verify

    def follow(self, known: int) -> None:
        """See `DrafterEngine.follow`."""
        self.model.call("drafter.follow", known)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """See `Engine.forward`; the logits are those of the tokens `ids`."""
        return self.model.logits("drafter.forward", len(self.ids), tokens, slots, positions)

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """Do the same as `forward` without running the LM head."""
        self.model.call("drafter.write", list(tokens), list(slots), list(positions))

    def reset(self) -> None:
        """Forget every slot."""
        self.model.call("drafter.reset")

    def fit(self, slots: int) -> None:
        """See `EngineProcess.fit`."""
        self.model.call("drafter.fit", slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Hide slots until they are written again."""
        self.model.call("drafter.forget", list(slots))


class AssistantProcess:
    """The assistant of a decoder in a separate process."""

    def __init__(self, model: EngineProcess) -> None:
        self.model = model

    def draft(self, token: int, position: int, count: int) -> tuple[list[int], list[float]]:
        """See `AssistantEngine.draft`."""
        found: tuple[list[int], list[float]] = self.model.call("drafter.draft", token, position, count)
        return found


class EncoderProcess(Process):
    """An encoder in a separate process, with the methods of `Encoder` that readers call."""

    def __init__(self, build: Path, precision: str) -> None:
        """Load the encoder of a build; see `Process`."""
        self.manifest = read_manifest(build, ENCODER)
        self.labels = tuple(self.manifest["labels"])
        self.buckets: tuple[int, ...] = tuple(self.manifest["buckets"])
        super().__init__(build, precision)

    @property
    def longest(self) -> int:
        """Return the most tokens of a pass."""
        return max(self.buckets)

    def bucket(self, count: int) -> int:
        """Return the bucket for `count` tokens. Raises ValueError if none is large enough."""
        return bucket_for(self.buckets, count)

    def run_together(self, texts: Sequence[Sequence[int]], bucket: int | None = None) -> list[Floats]:
        """Return the rows of each of the texts, which share a pass; see `Encoder.run_together`."""
        found: list[Floats] = self.call("run_together", [list(text) for text in texts], bucket)
        return found


def load_engine(build: Path, precision: str) -> EngineProcess:
    """Load a decoder in a separate process, see `Process`; a terminal shows meanwhile how far that is."""
    from rich.console import Console

    status = Console(stderr=True).status(f"loading {build}")
    with status, bundles.on_program_load(_progress(build, status.update)):
        return EngineProcess(build, precision)


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
        connection.send((0, RESULT, threads()))
        for number in count(1):
            method, arguments = connection.recv()
            connection.send((number, *_answer(model, method, arguments, memory)))


def _answer(model: Any, method: str, arguments: Sequence[Any], memory: mmap.mmap) -> tuple[str, Any]:
    """Call a method of the model and return the message with its result or exception."""
    try:
        if method == LOAD_DRAFTER:
            model.drafter = load_drafter(model)
            return RESULT, None
        value = attrgetter(method)(model)(*arguments)
    except Exception as error:
        return FAILED, _portrait(error)
    if method in ("forward", "drafter.forward"):
        np.copyto(_logits(memory, *value.T.shape), value.T)
        value = None
    return RESULT, value


def _portrait(error: Exception) -> Exception:
    """Return an error that can be sent: a ShardmillError unchanged, any other with its traceback as a note."""
    if not isinstance(error, ShardmillError):
        error.add_note("".join(traceback.format_exception(error)))
    return error


def _logit_bytes(manifest: Mapping[str, Any]) -> int:
    return int(4 * manifest["vocab"] * max(manifest["widths"]))


def _logits(memory: mmap.mmap, rows: int, tokens: int) -> Floats:
    """Return the logits of a pass in shared memory: [rows, T], as the engine lays them out."""
    return np.frombuffer(memory, np.float32, rows * tokens).reshape(rows, tokens)


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


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
