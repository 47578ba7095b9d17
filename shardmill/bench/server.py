"""Runs `shardmill serve` in a separate process, from its start to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2

from shardmill.errors import ShardmillError


def _follow_parent() -> None:
    """End this process in order when its standard input closes, as it does when the parent is gone.

    It is called in the server's process: bench/server.py names it in the command that starts one.
    """

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


MAIN = "from shardmill.cli import main; main()"
SHARDMILL = (sys.executable, "-c", MAIN)
FOLLOW = f"from {_follow_parent.__module__} import {_follow_parent.__name__}; {_follow_parent.__name__}()"
GREETING = re.compile(
    r"serving (?P<model>\S+) on the \S+ engine( \((?P<threads>\d+) threads?\))? at (?P<url>http://\S+)/v1"
)
PATIENCE = 20.0  # seconds to end in order


@dataclass(frozen=True)
class ServerProcess:
    """A server that is ready."""

    model: str
    url: str  # without a path
    threads: int | None  # number of the engine's threads; None if it can't choose
    ready_seconds: float  # from the start of the process


def command(build: Path, draft: Path | None, precision: str, guard_margin: float = 0.0) -> list[str]:
    """Return the command that starts the server of a build on a free port of this machine.

    The build is not checked: a check comes once for each machine, and its receipt would lie outside of a job's folder.
    """
    more = ["--draft-build", str(draft)] if draft else []
    more += ["--guard-margin", str(guard_margin)] if guard_margin else []
    options = ["--port", "0", "--drafter", "none", "--precision", precision, "--prefix-cache-bytes", "0", *more]
    return [sys.executable, "-c", f"{FOLLOW}; {MAIN}", "serve", str(build), "--no-check", *options]


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """Run the server that a command starts: ready inside the block, gone after it.

    Raises:
        ShardmillError: the server ended before it was ready.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SHARDMILL_API_KEY"}
    with tempfile.TemporaryFile("w+") as complaints:
        start = time.perf_counter()
        process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
        )
        try:
            greeting = _greeting(process, complaints)
            threads = int(greeting["threads"]) if greeting["threads"] else None
            server = ServerProcess(greeting["model"], greeting["url"], threads, time.perf_counter() - start)
            try:
                yield server
            except ShardmillError:
                sys.stderr.write(_said(complaints))  # the error itself has only the last line
                raise
        finally:
            _end(process)


def _greeting(process: subprocess.Popen[str], complaints: IO[str]) -> re.Match[str]:
    """Return the line with the server's address."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := GREETING.match(line):
            return match
    process.wait()
    last = (_said(complaints).strip().splitlines() or ["it said nothing"])[-1]
    raise ShardmillError(f"the server ended before it was ready: {last.removeprefix('shardmill: ')}")


def _said(complaints: IO[str]) -> str:
    complaints.seek(0)
    return complaints.read()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


Joules = Callable[[], float]  # joules used since some moment


@dataclass(frozen=True)
class TimedAnswer:
    """One answer.

    Attributes:
        drafted, accepted, pass_seconds: per decode pass; the seconds are the engine's.
        verified_again: rows that the exactness guard ran again alone.
        cached: prompt tokens that were reused from the previous request's KV cache.
        decode_seconds: from the end of the prefill, which gives the first token, to the last token.
        wall_seconds, joules: of the whole request, measured by the client; joules needs a meter.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    pass_seconds: tuple[float, ...]
    verified_again: int
    prompt_tokens: int
    cached: int
    prefill_seconds: float
    decode_seconds: float
    drafter_seconds: float
    wall_seconds: float
    joules: float | None

    @property
    def decoded(self) -> int:
        """Return the number of tokens from decoding; the first token comes from the prefill."""
        return len(self.tokens) - 1

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds per decoded token."""
        return self.decode_seconds / self.decoded


class Client:
    """A client of one server that sends one request at a time."""

    def __init__(self, model: str, http: httpx2.Client, joules: Joules | None = None) -> None:
        self._model, self._http, self._joules = model, http, joules

    def ask(self, prompt: tuple[int, ...], new_tokens: int, drafter: str) -> TimedAnswer:
        """Request the model's continuation of a prompt.

        Raises:
            ShardmillError: the server refuses the request or is gone.
        """
        body = self._body(prompt, new_tokens, drafter)
        before, start = self._joules and self._joules(), time.perf_counter()
        content = self._post("/v1/completions", body)
        seconds, after = time.perf_counter() - start, self._joules and self._joules()
        return _timed_answer(content, seconds, None if before is None or after is None else after - before)

    def margin(self, prompt: tuple[int, ...], at: int) -> float | None:
        """Return how close the two best logits are at token `at`, from 0 on, of the answer to `prompt` at T = 1.

        Return None if both tokens have the same text: the server then lists only one.
        """
        body = self._body(prompt, at + 1, "none") | {"logprobs": 2}
        (choice,) = self._post("/v1/completions", body)["choices"]
        best = sorted(choice["logprobs"]["top_logprobs"][at].values())[-2:]
        return best[1] - best[0] if len(best) > 1 else None

    def forget(self, prompt: tuple[int, ...]) -> None:
        """Make the server drop everything that `prompt` could reuse."""
        self.ask((1,) if prompt[0] == 0 else (0,), 1, "none")

    def _body(self, prompt: tuple[int, ...], new_tokens: int, drafter: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "shardmill": {"drafter": drafter, "private": True, "figures": True},
        }

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body)
        except httpx2.HTTPError as error:
            raise ShardmillError(f"the server is gone: {error}; check memory, and run it by hand") from error
        content: dict[str, Any] = response.json()
        if response.is_error:
            raise ShardmillError(f"the server refused a request: {content['error']['message']}")
        return content


def _timed_answer(content: dict[str, Any], seconds: float, joules: float | None) -> TimedAnswer:
    """Build an Answer from the server's JSON."""
    figures, usage = content["shardmill"], content["usage"]
    return TimedAnswer(
        tokens=tuple(figures["tokens"]),
        finish_reason=figures["finish_reason"],
        drafted=tuple(figures["drafted"]),
        accepted=tuple(figures["accepted"]),
        pass_seconds=tuple(figures["pass_seconds"]),
        verified_again=figures["verified_again"],
        prompt_tokens=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        prefill_seconds=figures["prefill_seconds"],
        decode_seconds=figures["decode_seconds"],
        drafter_seconds=figures["drafter_seconds"],
        wall_seconds=seconds,
        joules=joules,
    )


@contextmanager
def connected(server: ServerProcess, joules: Joules | None = None) -> Iterator[Client]:
    """Yield a client of `server`; it waits for an answer without a timeout, and uses no proxy."""
    with httpx2.Client(base_url=server.url, timeout=None, trust_env=False) as http:
        yield Client(server.model, http, joules)
