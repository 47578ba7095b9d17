"""Run programs for a Swift process: the portable engine behind a pipe.

    python swift/scripts/pipe_engine.py COMMAND...      # for example .build/release/shardmill-check BUILD

The command's standard input and output are the pipe; its module ShardmillPipe speaks on it. In either direction a frame
is a header's length (u32, little-endian), the header (JSON), and the arrays that the header lists, raw fp32. Requests:
load, state, run, read, write, drop, report. An answer whose header has `error` has no arrays. Everything above a single
Core ML model (widths, padding, chaining, caches, context lengths) belongs to the Swift side.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]


class Server:
    """The loaded functions and their states, by number."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.states: dict[int, Any] = {}
        self.made = 0
        self.reports: list[dict[str, Any]] = []

    def report(self, header: dict[str, Any], _: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Keep what the command found."""
        self.reports.append(header["report"])
        return {}, {}

    def load(self, header: dict[str, Any], _: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Load a function of a compiled bundle or a package."""
        import coremltools as ct

        path = Path(header["path"])
        model = ct.models.CompiledMLModel if path.suffix == ".mlmodelc" else ct.models.MLModel
        named = {"function_name": header["function"]} if header["function"] else {}
        self.models.append(model(str(path), compute_units=ct.ComputeUnit.CPU_AND_NE, **named))
        return {"model": len(self.models) - 1}, {}

    def state(self, header: dict[str, Any], _: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Make states of zeros."""
        self.made += 1
        self.states[self.made] = self.models[header["model"]].make_state()
        return {"state": self.made}, {}

    def drop(self, header: dict[str, Any], _: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Free states."""
        self.states.pop(header["state"], None)
        return {}, {}

    def run(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Run a function and return its outputs."""
        state = self.states[header["state"]] if header.get("state") else None
        return {}, self.models[header["model"]].predict(arrays, state=state)

    def read(self, header: dict[str, Any], _: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Return one state."""
        return {}, {header["name"]: self.states[header["state"]].read_state(header["name"])}

    def write(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Replace one state."""
        state = self.states[header["state"]]
        before = state.read_state(header["name"])
        state.write_state(header["name"], arrays[header["name"]].astype(before.dtype))
        return {}, {}


def receive(pipe: BinaryIO) -> tuple[dict[str, Any], Arrays] | None:
    """Return the next request and its arrays; None at the end."""
    size = pipe.read(4)
    if len(size) < 4:
        return None
    header = json.loads(pipe.read(struct.unpack("<I", size)[0]))
    arrays = {}
    for name, shape in header.get("arrays", []):
        raw = pipe.read(4 * int(np.prod(shape)))
        arrays[name] = np.frombuffer(raw, "<f4").reshape(shape)
    return header, arrays


def send(pipe: BinaryIO, header: dict[str, Any], arrays: Arrays) -> None:
    """Write an answer."""
    contiguous = {name: np.ascontiguousarray(array, "<f4") for name, array in arrays.items()}
    text = json.dumps(header | {"arrays": [[name, list(array.shape)] for name, array in contiguous.items()]}).encode()
    pipe.write(struct.pack("<I", len(text)) + text)
    for array in contiguous.values():
        pipe.write(array.tobytes())
    pipe.flush()


def serve(command: list[str], precision: str = "fp32", **options: Any) -> list[dict[str, Any]]:
    """Run a command and answer its requests until it ends; return what it reported.

    Args:
        command: the program and its arguments.
        precision: of the portable engine, fp32, or fp16 as the Neural Engine computes.
        options: further arguments of subprocess.Popen.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    import shardmill.portable

    shardmill.portable.install(precision=precision)
    server = Server()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        assert process.stdin and process.stdout
        while (request := receive(process.stdout)) is not None:
            header, arrays = request
            try:
                answer = getattr(server, header["op"])(header, arrays)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}, {}
            send(process.stdin, *answer)
        process.stdin.close()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return server.reports


if __name__ == "__main__":
    for report in serve(sys.argv[1:]):
        print(json.dumps(report))
