"""Measures the server's own time: its processor time for a token, and how long a draw takes.

    python lab/host_time.py build/demo [--against PYTHON] [--rounds 8]

`PYTHON` is the interpreter of another environment, in which another commit of shardmill is installed. Both are then
measured in turns, and the ratio is printed.

For a token: answers of 64 tokens, greedy and without drafts, one after the other. Counted is the processor time of the
server's process alone; the programs run in a process of their own. A draw: one token by temperature, top-k 40 and
top-p 0.9 from random logits of a vocabulary of 200,064, the median of 60, by processor time. A digest of 200 drawn
tokens must be equal in both environments.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from shardmill.bench.server import GREETING, MAIN

TOKENS = 64  # of an answer, or fewer if the model ends it
GENERATED = re.compile(r'shardmill_tokens_total\{kind="generated"\} (\S+)')
KINDS: dict[str, dict[str, object]] = {
    "whole": {},
    "streamed": {"stream": True},
    "streamed, logprobs 5": {"stream": True, "logprobs": 5},
}
DRAW = """
import hashlib, statistics, time
import numpy as np
try:
    from drafted_decoding.sampler import Sampler, Sampling
except ImportError:  # an older commit
    from shardmill.decode.sampler import Sampler, Sampling
rows = (np.random.default_rng(0).standard_normal((4, 200064)) * 2.5).astype(np.float32)
sampler = Sampler(Sampling(temperature=0.9, top_k=40, top_p=0.9, seed=5), [1], rows.shape[1])
seconds, tokens = [], []
for number in range(200):
    start = time.thread_time()
    tokens.append(sampler.next(rows[number % 4]))
    seconds.append(time.thread_time() - start)
print(1000 * statistics.median(seconds[-60:]), hashlib.sha256(repr(tokens).encode()).hexdigest()[:12])
"""


@contextmanager
def served(python: str, build: Path) -> Iterator[tuple[psutil.Process, int, str]]:
    """Start a server: its process, its port, and the model's name."""
    command = [python, "-c", MAIN, "serve", str(build), "--port", "0", "--drafter", "none", "--prefix-cache-bytes", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = GREETING.match(process.stdout.readline())
        if match is None:
            raise SystemExit(f"the server of {python} did not start")
        yield psutil.Process(process.pid), int(match["url"].rsplit(":", 1)[1]), match["model"]
    finally:
        process.terminate()
        process.wait(60)


def generated(port: int) -> float:
    """Return how many tokens a server has generated."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", "/metrics")
    count = GENERATED.search(connection.getresponse().read().decode())
    connection.close()
    return float(count[1]) if count else 0.0


def asked(server: tuple[psutil.Process, int, str], kind: str, number: int) -> float:
    """Ask for an answer; the milliseconds of processor time that the server took for a token."""
    process, port, model = server
    earlier = generated(port)
    body = {"model": model, "prompt": f"def f{number}(", "max_tokens": TOKENS, "temperature": 0, **KINDS[kind]}
    before = process.cpu_times()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {content.decode(errors='replace')}")
    after = process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return float(1000 * spent / (generated(port) - earlier))


def drawn(python: str) -> tuple[float, str]:
    """Return the milliseconds of a draw, and a digest of the drawn tokens."""
    said = subprocess.run([python, "-c", DRAW], capture_output=True, text=True, check=True).stdout.split()
    return float(said[0]), said[1]


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--against", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    pythons = [sys.executable, *([args.against] if args.against else [])]
    figures: dict[str, list[list[float]]] = {kind: [[] for _ in pythons] for kind in [*KINDS, "a draw"]}
    digests = set()
    for number in range(args.rounds):
        for which, python in enumerate(pythons):
            with served(python, args.build) as server:
                asked(server, "whole", 99)  # warms up
                for kind in KINDS:
                    figures[kind][which] += [asked(server, kind, 4 * number + one) for one in range(4)]
            took, digest = drawn(python)
            figures["a draw"][which].append(took)
            digests.add(digest)
    for kind, each in figures.items():
        middle = [(statistics.median if kind == "a draw" else statistics.mean)(one) for one in each]
        ratio = f"; against {middle[1]:.3f} ms: {middle[0] / middle[1]:.2f}" if args.against else ""
        print(f"{kind}: {middle[0]:.3f} ms{ratio}")
    print("the drawn tokens are", "equal" if len(digests) == 1 else "NOT EQUAL", *sorted(digests))


if __name__ == "__main__":
    main()
