"""A built model's server under many clients at once: no error but 429, every answer as if asked alone, memory flat.

    python benchmarks/soak.py build/demo [--minutes 5] [--clients 64]

Starts `shardmill serve` as a process and asks each of several dozen different requests alone: greedy and seeded, every
drafter, log-probabilities, stop strings, JSON schemas, prompts of the benchmark's tasks. Then all clients ask at
random for as long as told, with OpenAI's own client from one event loop: most read their answer whole or as a stream,
some read slowly, some leave in the middle of a stream, some while they still wait. The queue is shorter than there
are clients, so 429 occurs; whoever gets one waits as long as it says. At the end the server is killed with SIGKILL in
the middle of a stream, started again at the same port, asked again, and ended with SIGTERM. The exit code is 1 if
anything was not as promised, and every such thing is named.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
from openai import AsyncOpenAI

from shardmill.bench.prompts import of_tasks
from shardmill.bench.server import GREETING, SHARDMILL
from shardmill.decode.drafters import BY_ITSELF

TASKS = ("code_edit", "summary", "question", "copying", "free_text")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "ok": {"type": "boolean"}},
          "required": ["name", "ok"], "additionalProperties": False}  # fmt: skip
PATIENCE = 300.0  # seconds that an answer may take, the wait in the queue included
SETTLED = 60.0  # seconds after which memory must not grow
GROWTH = 0.03  # share by which it may, for allocators are not exact
LONGEST_GAP = 15.0  # seconds without any answer that count as being held up
Answer = tuple[str, str]  # text and why it ended


@dataclass
class Tally:
    """What happened."""

    expected: list[Answer]
    answers: Counter[str] = field(default_factory=Counter)  # by kind of client
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of ordinary answers, from asking to having
    moments: list[float] = field(default_factory=list)  # at which they were complete

    def check(self, kind: str, index: int, got: Answer) -> None:
        """Count an answer, and whether it is the expected one."""
        self.answers[kind] += 1
        if got != self.expected[index]:
            self.faults.append(f"{kind}: request {index} gave {got!r}, alone {self.expected[index]!r}")


class Process:
    """`shardmill serve` at a port."""

    def __init__(self, build: Path, port: int, queue: int) -> None:
        options = ["--port", str(port), "--queue", str(queue)]
        self.process = subprocess.Popen(
            [*SHARDMILL, "serve", str(build), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = GREETING.match(self.process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start: {self.process.communicate()[1]}")
        self.model, self.url = found["model"], found["url"]
        self.port = int(self.url.rsplit(":", 1)[1])

    def megabytes(self) -> float:
        """Return resident memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6

    def client(self) -> AsyncOpenAI:
        """Return a client that tries nothing twice."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; exit code and what was complained about."""
        self.process.send_signal(number)
        _, complaints = self.process.communicate(timeout=60)
        return self.process.returncode, complaints


def requests(folder: Path, model: str) -> list[dict[str, Any]]:
    """Return different requests; all fields of each are fixed, so its answer is fixed too."""
    found = of_tasks(folder, TASKS, 99, lambda text: list(text.encode()))
    texts = [bytes(prompt.tokens).decode() for prompt in found]
    made: list[dict[str, Any]] = []
    for i in range(4 * len(texts)):
        wanted: dict[str, Any] = {
            "model": model,
            "prompt": texts[i % len(texts)],
            "max_tokens": 12 + 7 * (i % 9),
            "temperature": 0.8 if i % 3 == 0 else 0,
            "seed": i,
            "extra_body": {"shardmill": {"drafter": BY_ITSELF[i % len(BY_ITSELF)]}},
        }
        wanted |= {"logprobs": 3} if i % 4 == 1 else {}
        wanted |= {"stop": ["\n\n", "return"]} if i % 4 == 2 else {}
        if i % 10 == 9 and importlib.util.find_spec("llguidance"):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
            wanted["extra_body"] = {**wanted["extra_body"], "response_format": form}
        made.append(wanted)
    return made


async def whole(client: AsyncOpenAI, request: dict[str, Any]) -> Answer:
    """Return an answer in one piece."""
    choice = (await client.completions.create(**request)).choices[0]
    return choice.text, choice.finish_reason


async def streamed(client: AsyncOpenAI, request: dict[str, Any], pause: float = 0.0, most: int = 1 << 30) -> Answer:
    """Return an answer as it comes, with a pause after each piece; given up after `most` pieces."""
    text, reason = "", ""
    async with await client.completions.create(**request, stream=True) as stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
            most -= 1
            if not most:
                break
            await asyncio.sleep(pause)
    return text, reason


async def ask(kind: str, client: AsyncOpenAI, request: dict[str, Any], rng: random.Random) -> Answer | None:
    """Return one request in the way of a kind of client; None where the answer was not waited for."""
    if kind == "whole":
        return await whole(client, request)
    if kind == "stream":
        return await streamed(client, request)
    if kind == "slow":
        return await streamed(client, request, pause=0.3)
    if kind == "leaves mid-stream":
        await streamed(client, request, most=rng.randrange(1, 6))
        return None
    waiting = asyncio.ensure_future(whole(client, request))  # leaves while it waits
    await asyncio.sleep(rng.random())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return None


KINDS = ("whole", "stream", "whole", "stream", "whole", "stream", "slow", "leaves mid-stream", "leaves the queue")


async def visit(number: int, server: Process, asked: Sequence[dict[str, Any]], tally: Tally, until: float) -> None:
    """Send requests one after another, as a client does."""
    rng, kind = random.Random(number), KINDS[number % len(KINDS)]
    async with server.client() as client:
        while time.monotonic() < until:
            index, start = rng.randrange(len(asked)), time.monotonic()
            try:
                answer = await ask(kind, client, asked[index], rng)
            except openai.RateLimitError as error:
                tally.refused += 1
                await asyncio.sleep(float(error.response.headers["retry-after"]) * rng.random())
                continue
            except Exception as error:
                tally.faults.append(f"{kind}: request {index}: {type(error).__name__}: {error}")
                continue
            if answer is None:
                tally.answers[kind] += 1
                continue
            tally.check(kind, index, answer)
            if kind in ("whole", "stream"):
                tally.seconds.append(time.monotonic() - start)
                tally.moments.append(time.monotonic())


async def watch(server: Process, until: float) -> list[tuple[float, float]]:
    """Return (seconds since the start, megabytes) every few seconds."""
    start, seen = time.monotonic(), []
    while time.monotonic() < until:
        seen.append((time.monotonic() - start, server.megabytes()))
        await asyncio.sleep(2)
    return seen


async def crowd(server: Process, asked: Sequence[dict[str, Any]], tally: Tally, args: argparse.Namespace) -> float:
    """Return all clients at once. Judges memory and gaps; returns how much memory grew once settled, in megabytes."""
    until = time.monotonic() + 60 * args.minutes
    memory, *_ = await asyncio.gather(
        watch(server, until), *(visit(n, server, asked, tally, until) for n in range(args.clients))
    )
    settled = [size for at, size in memory if at >= min(SETTLED, 30 * args.minutes)]
    grown = max(settled[-5:]) - settled[0]
    print(f"memory: {settled[0]:.0f} MB after {min(SETTLED, 30 * args.minutes):.0f} s, {settled[-1]:.0f} MB at the end")
    if grown > GROWTH * settled[0]:
        tally.faults.append(f"memory grew by {grown:.0f} MB")
    gap = max(b - a for a, b in zip(tally.moments, tally.moments[1:], strict=False))
    print(f"longest time without any answer: {gap:.1f} s")
    if gap > LONGEST_GAP:
        tally.faults.append(f"nobody was answered for {gap:.1f} s")
    return grown


async def kill_and_restart(
    server: Process, asked: Sequence[dict[str, Any]], tally: Tally, args: argparse.Namespace
) -> None:
    """Kill a server mid-stream; the next one at its port must give equal answers and end in order by SIGTERM."""
    long = {**asked[0], "max_tokens": 400}
    async with server.client() as client, await client.completions.create(**long, stream=True) as stream:
        await anext(aiter(stream))
        server.end(signal.SIGKILL)
        try:
            async for _ in stream:
                pass
            tally.faults.append("a stream of a killed server came to an end")
        except openai.APIError:
            pass
    again = Process(args.build, server.port, args.queue)
    async with again.client() as client:
        for index in range(0, len(asked), 7):
            tally.check("after SIGKILL", index, await whole(client, asked[index]))
    code, complaints = again.end(signal.SIGTERM)
    if code or complaints:
        tally.faults.append(f"after SIGTERM: exit code {code}, {complaints!r}")


async def soak(args: argparse.Namespace) -> int:
    """Return the whole run."""
    server = Process(args.build, 0, args.queue)
    try:
        asked = requests(args.tasks, server.model)
        async with server.client() as client:
            tally = Tally([await whole(client, request) for request in asked])
        print(f"{len(asked)} requests asked alone; {args.clients} clients for {args.minutes:g} minutes", flush=True)
        await crowd(server, asked, tally, args)
        await kill_and_restart(server, asked, tally, args)
    finally:
        server.process.kill()
    ordinary = sorted(tally.seconds)
    print(f"answers: {dict(tally.answers)}, 429: {tally.refused}")
    print(f"seconds to a whole answer: median {ordinary[len(ordinary) // 2]:.1f}, worst {ordinary[-1]:.1f}")
    print("\n".join(tally.faults[:50]) or "nothing was not as promised")
    return int(bool(tally.faults))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of a built model")
    parser.add_argument("--tasks", type=Path, default=Path("resources/tasks"), help="folder of prompts by task")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--queue", type=int, default=48, help="the server's; fewer than clients, so that 429 occurs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(asyncio.run(soak(parse(None))))
