"""Checks a server under many clients at once: no error but 429, every answer as if asked alone, no leak.

    python lab/soak.py build/demo [--minutes 5] [--clients 64]

The build must take adapters (`program: {shapes: fixed, adapters: 8}`). Two random ones are written with PEFT and laid
into the build for the time of the run. A server that keeps no prefixes answers every request alone: completions with
every drafter, greedy and seeded, with log-probabilities, stop strings, JSON schemas and several choices; conversations
turn by turn; functions; /v1/responses; /v1/decide; and several of these with each adapter.

Then a server that keeps few bytes of prefixes, so that they must make room for others, is asked the same once more, one
request at a time. Afterwards it has learned from all texts, and knows their prefixes. From then on it is asked by all
clients at random for as long as told, with OpenAI's own client from one event loop. Most read their answer whole or as
a stream, some hold a conversation, some read slowly, some leave in the middle of a stream or while they still wait, and
some are processes that die by SIGKILL. The queue is shorter than there are clients, so 429 occurs; whoever gets one
waits as long as it says. Meanwhile an adapter is added again and again. At the end the server is killed with SIGKILL in
the middle of a stream, started again at the same port, asked again, and ended with SIGTERM. The exit code is 1 if
anything was not as promised. Every such thing is named, and each limit is printed with its value.

Memory is compared at two moments without clients, halfway and at the end. The server and its engine each count the
bytes that are in use (soak_memory.py), less the kept prefixes, whose bytes the server tells. In the second half these
bytes may grow by half a kilobyte for each answer that was read, and by 0.5 MB for blocks that threads keep. So a leak
of a kilobyte per answer is found if 1,100 answers are read then, and an hour has more. Requests that are refused or
given up must leave nothing. Resident memory may grow by 16 MB. This limit finds what goes past the allocators, such as
mapped files. A lower limit would find pages that allocators keep from the busiest moment: 1000 abandoned requests that
waited at once left 11 MB (lab/benchmarks.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai
import psutil
from openai import AsyncOpenAI
from soak_memory import in_use, watched
from soak_requests import ADAPTERS, TEMPLATE, Answer, Request, adapters, ask_alone, same, streamed, whole

from shardmill.bench.server import GREETING, SHARDMILL

PATIENCE = 1200.0  # seconds that an answer may take; each text of a decision waits in the queue
MOMENTS = (1, 5, 10, 20, 30, 40, 60)  # minutes at which memory is printed
LEAK = 512  # bytes in use that an answer may leave behind
KEPT = 1 << 19  # bytes in use that a process may add, however few answers there are
PAGES = 16e6  # bytes of resident memory that a process may add
LONGEST_GAP = 15.0  # seconds without any answer that count as being held up
GIVEN_UP = "given up"  # in place of the kind of a request whose client left or was killed
AGAIN = 60.0  # seconds after which an adapter is added again
CLIENT = """import socket, sys
asked = sys.stdin.buffer.read()
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(asked)
while connection.recv(64):
    pass
"""  # a client that reads until it is killed


@dataclass(frozen=True)
class Limit:
    """A value that was measured, and the most that it may be."""

    name: str
    value: float
    most: float

    @property
    def holds(self) -> bool:
        """Return whether the value is within the limit."""
        return self.value <= self.most


@dataclass
class Tally:
    """What happened."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kinds of client and of request
    refused: int = 0
    cached: int = 0  # tokens of prompts that were not computed again
    faults: list[str] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of ordinary answers, from asking to having
    moments: list[float] = field(default_factory=list)  # at which they were complete

    def fault(self, what: str) -> None:
        """Print something that was not as promised when it happens, and keep it."""
        print(what, flush=True)
        self.faults.append(what)

    def limit(self, name: str, value: float, most: float) -> None:
        """Keep a value and its limit for the table at the end."""
        self.limits.append(Limit(name, value, most))

    @property
    def read(self) -> int:
        """Return how many answers were read."""
        return sum(count for (_, asked), count in self.answers.items() if asked != GIVEN_UP)

    def table(self) -> str:
        """Return a table of the limits."""
        rows = [("limit", "value", "at most", "holds")]
        rows += [(one.name, f"{one.value:.1f}", f"{one.most:.1f}", "yes" if one.holds else "NO") for one in self.limits]
        return "\n".join(f"{name:45} {value:>10} {most:>10} {holds:>6}" for name, value, most, holds in rows)


@dataclass(frozen=True)
class Memory:
    """A process in a moment without clients: bytes in use less kept prefixes, resident bytes, and open files."""

    used: float
    resident: float
    files: int


class Process:
    """`shardmill serve` at a port, with a chat template and some bytes for prefixes."""

    def __init__(self, args: argparse.Namespace, template: Path, prefixes: int, port: int = 0) -> None:
        self.counts = template.parent  # where the processes write how many bytes they use
        options = {"--port": port, "--queue": args.queue, "--prefix-cache-bytes": prefixes, "--chat-template": template}
        words = [str(word) for option in options.items() for word in option]
        self.process = subprocess.Popen(
            [*SHARDMILL, "serve", str(args.build), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=watched(self.counts),
        )
        assert self.process.stdout is not None
        match = GREETING.match(self.process.stdout.readline())
        if match is None:
            raise SystemExit(f"the server did not start: {self.process.communicate()[1]}")
        self.model, self.url = match["model"], match["url"]
        self.port = int(self.url.rsplit(":", 1)[1])
        server = psutil.Process(self.process.pid)
        (engine,) = (one for one in server.children() if "shardmill.runtime.process" in " ".join(one.cmdline()))
        self.seen = {"server": server, "engine": engine}

    def usage(self) -> dict[str, tuple[float, int]]:
        """Return resident megabytes and the number of open files of the server and of its engine."""
        return {name: (one.memory_info().rss / 1e6, one.num_fds()) for name, one in self.seen.items()}

    def metrics(self) -> dict[str, float]:
        """Return the server's numbers about kept prefixes and its queue."""
        page = httpx2.get(f"{self.url}/metrics").text
        pairs = re.findall(r"^shardmill_((?:prefix|queue_length|running)\S*) (\S+)$", page, re.MULTILINE)
        return {name: float(value) for name, value in pairs}

    def memory(self) -> dict[str, Memory]:
        """Return the memory of the server and of its engine, which keeps the prefixes."""
        used = {name: float(in_use(one.pid, self.counts)) for name, one in self.seen.items()}
        used["engine"] -= self.metrics()["prefix_cache_bytes"]
        return {name: Memory(used[name], one.memory_info().rss, one.num_fds()) for name, one in self.seen.items()}

    def client(self) -> AsyncOpenAI:
        """Return a client that tries nothing twice."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; exit code and what was complained about."""
        self.process.send_signal(number)
        _, complaints = self.process.communicate(timeout=60)
        return self.process.returncode, complaints


async def killed(server: Process, request: Request, seconds: float) -> None:
    """Ask from a process that is killed after a while."""
    body = {key: value for key, value in request.body.items() if key != "extra_body"}
    path = {"chat": "chat/completions"}.get(request.path, request.path)
    content = json.dumps(body | ({} if path == "decide" else {"stream": True})).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", CLIENT, str(server.port), stdin=asyncio.subprocess.PIPE
    )
    assert client.stdin is not None
    client.stdin.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    client.stdin.close()
    await asyncio.sleep(seconds)
    with suppress(ProcessLookupError):
        client.kill()
    await client.wait()


async def leave(client: AsyncOpenAI, request: Request, seconds: float) -> None:
    """Ask, and go away while the request waits. Raises what the answer was, if it was an error."""
    waiting = asyncio.ensure_future(whole(client, request))
    await asyncio.sleep(seconds)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting


KINDS = ("whole", "stream", "converses", "whole", "stream", "converses", "slow",
         "leaves mid-stream", "leaves the queue", "killed")  # fmt: skip


class Crowd:
    """All clients of a server, what they ask by kind of request, and how each request is answered alone."""

    def __init__(self, server: Process, alone: Sequence[Sequence[tuple[Request, Answer]]], tally: Tally) -> None:
        self.server, self.tally = server, tally
        self.talks = [turns for turns in alone if len(turns) > 1]
        self.kinds: dict[str, list[tuple[Request, Answer]]] = {}
        for turn in (turn for turns in alone for turn in turns):
            self.kinds.setdefault(turn[0].kind, []).append(turn)

    def check(self, kind: str, request: Request, got: Answer, expected: Answer) -> None:
        """Count an answer, and whether it is the expected one."""
        self.tally.answers[kind, request.kind] += 1
        if not same(got, expected):
            self.tally.fault(f"{kind}: {request} gave {got!r}, alone {expected!r}")

    async def ask(self, kind: str, client: AsyncOpenAI, turn: tuple[Request, Answer], rng: random.Random) -> None:
        """Send one request in the way of a kind of client."""
        (request, expected), start = turn, time.monotonic()
        if kind == "killed":
            await killed(self.server, request, 3 * rng.random())
        elif kind == "leaves the queue":
            await leave(client, request, rng.random())
        elif kind == "leaves mid-stream" and request.path != "decide":
            await streamed(client, request, most=rng.randrange(1, 6))
        elif request.path == "decide" or kind == "whole" or (kind == "converses" and rng.random() < 0.5):
            got, cached = await whole(client, request)
            self.tally.cached += cached
            self.check(kind, request, got, expected)
        else:
            self.check(kind, request, await streamed(client, request, 0.3 if kind == "slow" else 0.0), expected)
        if kind in ("killed", "leaves the queue", "leaves mid-stream"):
            self.tally.answers[kind, GIVEN_UP] += 1
        elif kind != "slow":
            self.tally.seconds.append(time.monotonic() - start)
            self.tally.moments.append(time.monotonic())

    async def visit(self, number: int, until: float) -> None:
        """Send requests one after another, as a client does."""
        rng, kind = random.Random(number), KINDS[number % len(KINDS)]
        turns: list[tuple[Request, Answer]] = []
        async with self.server.client() as client:
            while time.monotonic() < until:
                if not turns and kind == "converses":
                    turns = list(rng.choice(self.talks))
                elif not turns:
                    turns = [rng.choice(self.kinds[rng.choice(list(self.kinds))])]
                try:
                    await self.ask(kind, client, turns[0], rng)
                except openai.RateLimitError as error:
                    self.tally.refused += 1
                    await asyncio.sleep(float(error.response.headers["retry-after"]) * rng.random())
                    continue
                except Exception as error:
                    self.tally.fault(f"{kind}: {turns[0][0]}: {type(error).__name__}: {error}")
                    await asyncio.sleep(1)  # a server that is gone fails every request at once
                turns = turns[1:]

    async def watch(self, until: float) -> None:
        """Print memory at some moments."""
        start = time.monotonic()
        for due in [60.0 * minute for minute in MOMENTS if 60 * minute < until - start]:
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            told = (f"{name} {size:.0f} MB, {files} files" for name, (size, files) in self.server.usage().items())
            print(f"after {due / 60:.0f} minutes: {', '.join(told)}; {len(self.tally.moments)} answers", flush=True)

    async def all_ask(self, build: Path, folder: Path, seconds: float, numbers: Sequence[int]) -> dict[str, Memory]:
        """Let clients with these numbers ask for some time; memory when all have gone. Judges the gaps."""
        until, done = time.monotonic() + seconds, len(self.tally.moments)
        await asyncio.gather(
            self.watch(until),
            add_again(build, folder, until, self.tally),
            *(self.visit(number, until) for number in numbers),
        )
        moments = self.tally.moments[done:]
        gap = max((b - a for a, b in zip(moments, moments[1:], strict=False)), default=seconds)
        self.tally.limit("seconds without any answer", gap, LONGEST_GAP)
        await asyncio.sleep(10)
        return self.server.memory()


async def add_again(build: Path, folder: Path, until: float, tally: Tally) -> None:
    """Add an adapter with the command again and again while the server runs."""
    while time.monotonic() < until - AGAIN:
        await asyncio.sleep(AGAIN)
        command = (*SHARDMILL, "adapter", "add", str(build), str(folder), "--name", folder.name)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        if await process.wait():
            tally.fault(f"adding an adapter failed: exit code {process.returncode}")


async def crowd(clients: Crowd, folder: Path, args: argparse.Namespace) -> None:
    """Let all clients ask at once, in two halves. Judges memory, open files and kept prefixes."""
    server, tally, half = clients.server, clients.tally, 30 * args.minutes
    moments, read = [server.memory()], [tally.read]
    for numbers in (range(args.clients), range(args.clients, 2 * args.clients)):
        moments.append(await clients.all_ask(args.build, folder, half, numbers))
        read.append(tally.read)
    print(f"{read[2] - read[1]} answers read in the second half, {read[1] - read[0]} in the first")
    for name, before in moments[0].items():
        first, last = (moment[name] for moment in moments[1:])
        told = (f"{one.used / 1e6:.2f} MB in use, {one.resident / 1e6:.1f} resident" for one in (before, first, last))
        print(f"{name} without clients: {'; '.join(told)}")
        allowed = KEPT + LEAK * (read[2] - read[1])
        tally.limit(f"growth of the {name}'s bytes in use, kB", (last.used - first.used) / 1e3, allowed / 1e3)
        tally.limit(f"growth of the {name}'s resident memory, kB", (last.resident - first.resident) / 1e3, PAGES / 1e3)
        tally.limit(f"open files of the {name} more than before", last.files - before.files, 0)
    counts = server.metrics()
    print(f"counters: {counts}")
    if not counts["prefix_cache_evictions_total"]:
        tally.fault("kept prefixes never had to make room: give --prefix-bytes less, or clients more time")


async def kill_and_restart(
    server: Process, template: Path, alone: Sequence[tuple[Request, Answer]], tally: Tally, args: argparse.Namespace
) -> None:
    """Kill a server mid-stream; the next one at its port must give equal answers and end in order by SIGTERM."""
    long = {**alone[0][0].body, "max_tokens": 400}
    async with server.client() as client, await client.completions.create(**long, stream=True) as stream:
        await anext(aiter(stream))
        server.end(signal.SIGKILL)
        try:
            async for _ in stream:
                pass
            tally.fault("a stream of a killed server came to an end")
        except openai.APIError:
            pass
    again = Process(args, template, args.prefix_bytes, server.port)
    async with again.client() as client:
        clients = Crowd(again, [alone], tally)
        for request, expected in alone[::5]:
            clients.check("after SIGKILL", request, (await whole(client, request))[0], expected)
    code, complaints = again.end(signal.SIGTERM)
    complaints = "".join(line for line in complaints.splitlines(True) if not line.startswith("[transformers]"))
    if code or complaints:
        tally.fault(f"after SIGTERM: exit code {code}, {complaints!r}")


async def soak(args: argparse.Namespace) -> int:
    """Return the whole run."""
    with tempfile.TemporaryDirectory() as place, adapters(args.build) as written:
        template = Path(place) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        tally = Tally()
        server = Process(args, template, 0)
        try:
            async with server.client() as client:
                alone = await ask_alone(client, server.model, args.tasks, args.conversations)
            server.end(signal.SIGTERM)
            flat = [turn for turns in alone for turn in turns]
            print(f"{len(flat)} requests asked alone; {args.clients} clients for {args.minutes:g} minutes", flush=True)
            server = Process(args, template, args.prefix_bytes)
            clients = Crowd(server, alone, tally)
            async with server.client() as client:
                for request, expected in flat:
                    clients.check("one at a time", request, (await whole(client, request))[0], expected)
            await crowd(clients, written[ADAPTERS[0]], args)
            await kill_and_restart(server, template, flat, tally, args)
        finally:
            server.process.kill()
    ordinary = sorted(tally.seconds)
    for (kind, asked), count in sorted(tally.answers.items()):
        print(f"{kind}, {asked}: {count}")
    print(f"429: {tally.refused}; {tally.cached} tokens of prompts cached")
    print(f"seconds to a whole answer: median {ordinary[len(ordinary) // 2]:.1f}, worst {ordinary[-1]:.1f}")
    tally.limit("answers and ends not as promised", len(tally.faults), 0)
    print(tally.table())
    return int(not all(limit.holds for limit in tally.limits))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of a built model that takes adapters")
    parser.add_argument("--tasks", type=Path, default=Path("resources/tasks"), help="folder of prompts by task")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--prefix-bytes", type=int, default=16 << 20, help="the server's --prefix-cache-bytes")
    parser.add_argument("--queue", type=int, default=48, help="the server's; fewer than clients, so that 429 occurs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(soak(parse(None))))
