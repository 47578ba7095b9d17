"""Lets a server live as a service under load: no wrong answer, flat memory, a short log.

    python lab/service.py build/demo [--requests 2000] [--minutes 60]

The script stands in for systemd: it holds the socket, passes it on, and starts the server again when it ends with an
error, as docs/service/ says. The server computes in fp16, where an answer is always the same to the bit, and may open
256 files at most. 300 connections that ask nothing are opened, and opened again when they are closed.

Each request is first asked alone, without drafts. Then they come in bursts of 20 over the given time, whole and as
streams, with every drafter. A third is abandoned after up to two seconds. In the first half the engine's process is
killed twice, in the middle of a burst; whoever is told of it, by an error or the end of the connection, asks again.
Memory is compared at two moments without requests, at two thirds and at the end.

The exit code is 1 unless all limits hold, which are printed with their values.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
from soak_requests import TASKS, TEMPLATE, Request, completions, others

from shardmill.bench.prompts import of_tasks
from shardmill.bench.server import MAIN

BURST, IDLE, FILES = 20, 300, 256
TOKENS = 24  # of an answer, at most
KINDS = 40  # different requests
PATIENCE = 900.0  # seconds that an answer may take, also if the server was killed or is full
GROWTH = 16e6  # bytes of resident memory that a process may add; lab/soak.py says why no less
LOG = 1e6  # bytes
PASSED_ON = """import os, resource
os.dup2({0}, 3)
os.environ |= {{"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}}
resource.setrlimit(resource.RLIMIT_NOFILE, ({1}, {1}))
{2}"""
Json = dict[str, Any]


@dataclass
class Service:
    """What systemd would hold: the socket, the log and the process."""

    command: Sequence[str]
    listener: socket.socket
    log: Path
    starts: int = 0
    process: asyncio.subprocess.Process | None = None
    closing: bool = False

    async def keep(self) -> None:
        """Start the server, and again whenever it ends with an error."""
        while not self.closing:
            self.starts += 1
            with self.log.open("a") as log:
                code = PASSED_ON.format(self.listener.fileno(), FILES, MAIN)
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", code, *self.command, stdout=log, stderr=log, pass_fds=[self.listener.fileno()]
                )
            if await self.process.wait() == 0:
                return
            await asyncio.sleep(2)  # RestartSec

    def processes(self) -> dict[str, psutil.Process]:
        """Return the server's process, the engine's and the one that renders templates."""
        assert self.process is not None
        ours = {"server": psutil.Process(self.process.pid)}
        for child in ours["server"].children():
            ours["engine" if "shardmill.runtime.process" in " ".join(child.cmdline()) else "templates"] = child
        return ours

    async def end(self) -> int:
        """End the server in order; its exit code."""
        assert self.process is not None
        self.closing = True
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


@dataclass
class Tally:
    """What happened, by what it was."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def fault(self, what: str) -> None:
        """Print something that was not as promised when it happens, and count it."""
        print(what[:2000], flush=True)
        self.counts["faults"] += 1


def path_of(request: Request) -> str:
    """Return the address of a request."""
    return "/v1/" + {"chat": "chat/completions"}.get(request.path, request.path)


def body_of(request: Request, **more: Any) -> Json:
    """Return the fields of a request as they are sent."""
    body: Json = dict(request.body)
    extra: Json = body.pop("extra_body", {})
    if "max_tokens" in body:
        body["max_tokens"] = min(body["max_tokens"], TOKENS)
    return body | extra | more


def told(content: Json) -> str:
    """Return what an answer says, without its name and what calls are named."""
    choices = content.get("choices") or content["data"]
    for call in (call for choice in choices for call in choice.get("message", {}).get("tool_calls", ())):
        del call["id"]
    return json.dumps(choices, sort_keys=True)


def joined(lines: Sequence[str]) -> str:
    """Return what a stream of a completion says, in the words of `told`. Raises httpx2.ReadError if it has no end."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if "data: [DONE]" not in lines or any("error" in chunk for chunk in chunks):
        raise httpx2.ReadError("the stream has no end")
    choices: dict[int, Json] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        one = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
        one["text"] += part["text"]
        one["finish_reason"] = part["finish_reason"]
        if part["logprobs"]:
            known = one["logprobs"] or {key: [] for key in part["logprobs"]}
            one["logprobs"] = {key: known[key] + value for key, value in part["logprobs"].items()}
    return told({"choices": list(choices.values())})


async def answer(client: httpx2.AsyncClient, request: Request, stream: bool) -> tuple[int, str]:
    """Return an answer's status and what it says."""
    if not stream:
        got = await client.post(path_of(request), json=body_of(request))
        return got.status_code, told(got.json()) if got.status_code == 200 else got.text
    async with client.stream("POST", path_of(request), json=body_of(request, stream=True)) as got:
        if got.status_code != 200:
            return got.status_code, (await got.aread()).decode()
        return 200, joined([line async for line in got.aiter_lines()])


async def ask(client: httpx2.AsyncClient, request: Request, expected: str, rng: random.Random, tally: Tally) -> None:
    """Ask until there is an answer, and compare it."""
    stream, start = request.path == "completions" and rng.random() < 0.5, time.monotonic()
    while True:
        try:
            status, said = await answer(client, request, stream)
        except (httpx2.TransportError, json.JSONDecodeError):
            status, said = 0, "no answer"
        if status == 200:
            tally.seconds.append(time.monotonic() - start)
            tally.counts["streams" if stream else "whole answers"] += 1
            if said != expected:
                tally.fault(f"{request} gave {said!r}, alone {expected!r}")
            return
        if status not in (0, 429, 500, 503) or time.monotonic() > start + PATIENCE:
            tally.fault(f"{request} was not answered: {status} {said}")
            return
        tally.counts[f"asked again after {status or 'no answer'}"] += 1
        await asyncio.sleep(3)


async def abandon(client: httpx2.AsyncClient, request: Request, rng: random.Random, tally: Tally) -> None:
    """Ask, and leave."""
    more = {"stream": True} if request.path != "decide" and rng.random() < 0.7 else {}
    with suppress(httpx2.TransportError, TimeoutError):
        async with asyncio.timeout(2 * rng.random()):
            async with client.stream("POST", path_of(request), json=body_of(request, **more)) as got:
                async for _ in got.aiter_bytes():
                    pass
    tally.counts["abandoned"] += 1


async def idle(port: int, tally: Tally) -> None:
    """Keep connections open that ask nothing."""
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        while True:
            for reader, writer in [one for one in connections if one[0].at_eof() or one[0].exception()]:
                connections.remove((reader, writer))
                writer.close()
            while len(connections) < IDLE:
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(5):
                        connections.append(await asyncio.open_connection("127.0.0.1", port))
                        tally.counts["idle connections"] += 1
                        continue
                break
            await asyncio.sleep(10)
    finally:
        for _, writer in connections:
            writer.close()


async def kill_engine(service: Service, tally: Tally) -> None:
    """Kill the process that runs the programs, shortly after a burst has begun."""
    await asyncio.sleep(1.5)
    service.processes()["engine"].kill()
    tally.counts["engines killed"] += 1


async def memory(service: Service) -> dict[str, float]:
    """Return the resident bytes of each process a while after the last answer."""
    await asyncio.sleep(10)
    return {name: float(one.memory_info().rss) for name, one in service.processes().items()}


async def live(service: Service, port: int, tasks: Path, args: argparse.Namespace) -> int:
    """Return the exit code of the whole run."""
    tally, rng = Tally(), random.Random(5)
    prompts = of_tasks(tasks, TASKS, 99, lambda text: list(text.encode()))
    texts = [bytes(prompt.tokens).decode()[:600] for prompt in prompts]
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        kinds = [*completions(texts, model), *others(texts, model)]
        kinds = rng.sample([one for one in kinds if one.kind != "adapter" and one.path != "responses"], KINDS)
        alone = []
        for request in kinds:
            body = body_of(request) if request.path == "decide" else body_of(request, shardmill={"drafter": "none"})
            alone.append(told((await client.post(path_of(request), json=body)).json()))
        print(f"{len(kinds)} requests asked alone", flush=True)
        idling, start = asyncio.ensure_future(idle(port, tally)), time.monotonic()
        between, marks, tasks_ = 60 * args.minutes * BURST / args.requests, [], set[asyncio.Task[None]]()
        bursts = args.requests // BURST
        for burst in range(bursts):
            await asyncio.sleep(max(0.0, start + burst * between - time.monotonic()))
            if burst in (bursts // 6, bursts // 3):
                tasks_.add(asyncio.ensure_future(kill_engine(service, tally)))
            for number in range(BURST):
                which = rng.randrange(len(kinds))
                lottery = random.Random(rng.random())
                made = (
                    abandon(client, kinds[which], lottery, tally)
                    if number % 3 == 0
                    else ask(client, kinds[which], alone[which], lottery, tally)
                )
                tasks_.add(asyncio.ensure_future(made))
            if burst in (2 * bursts // 3, bursts - 1):
                await asyncio.gather(*tasks_)
                tasks_.clear()
                marks.append(await memory(service))
            if burst % max(1, bursts // 10) == 0:
                sizes = {name: f"{one.memory_info().rss / 1e6:.0f} MB" for name, one in service.processes().items()}
                print(f"{time.monotonic() - start:.0f} s: {dict(tally.counts)}, {sizes}", flush=True)
        took = time.monotonic() - start
        idling.cancel()
    code, log = await service.end(), service.log.read_text(errors="replace")
    print(log[:2000])
    ordinary = sorted(tally.seconds)
    print(f"{took / 60:.1f} minutes; {dict(tally.counts)}; seconds to an answer: median "
          f"{ordinary[len(ordinary) // 2]:.1f}, worst {ordinary[-1]:.1f}")  # fmt: skip
    rows: list[tuple[str, float, float]] = [
        ("answers that were wrong or never came", tally.counts["faults"], 0),
        ("starts of the server besides three", abs(service.starts - 3), 0),
        ("exit code after SIGTERM", abs(code), 0),
        ("tracebacks in the log", log.count("Traceback"), 0),
        ("bytes of the log", len(log), LOG),
    ]
    for name, before in marks[0].items():
        print(f"{name}: {before / 1e6:.1f} MB at two thirds, {marks[1].get(name, 0) / 1e6:.1f} MB at the end")
        rows.append((f"growth of the {name}'s memory, MB", (marks[1].get(name, 0) - before) / 1e6, GROWTH / 1e6))
    for what, value, most in rows:
        print(f"{what:45} {value:12.1f} {most:12.1f} {'yes' if value <= most else 'NO':>4}")
    return int(any(value > most for _, value, most in rows))


async def run(args: argparse.Namespace) -> int:
    """Serve, and return the exit code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))  # this script's own connections
    with tempfile.TemporaryDirectory() as place, socket.socket() as listener:
        template = Path(place) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        command = ["serve", str(args.build), "--precision", "fp16", "--chat-template", str(template),
                   "--prefix-cache-bytes", str(16 << 20)]  # fmt: skip
        service = Service(command, listener, Path(place) / "log")
        keeping = asyncio.ensure_future(service.keep())
        try:
            return await live(service, listener.getsockname()[1], args.tasks, args)
        finally:
            service.closing = True
            if service.process is not None and service.process.returncode is None:
                service.process.kill()
            await keeping


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of a built model that generates text")
    parser.add_argument("--tasks", type=Path, default=Path("resources/tasks"), help="folder of prompts by task")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=2000)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(parse(None))))
