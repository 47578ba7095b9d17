"""What /metrics says of the server itself: its memory, what it serves, and which adapter answers."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
from drafted_decoding import GenerationResult
from patience import PATIENCE

from shardmill import __version__
from shardmill.serve.metrics import Metrics, resident


def test_memory_is_that_of_the_processes_that_are_there() -> None:
    held = "held = bytearray(64 << 20); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        processes, metrics = {"server": os.getpid(), "engine": other.pid}, Metrics()
        metrics.describe("demo", "portable", lambda: processes)
        told = read(metrics)
        expected = psutil.Process(other.pid).memory_info().rss
        assert told['shardmill_memory_bytes{process="engine"}'] == expected >= 64 << 20
        assert told['shardmill_memory_bytes{process="server"}'] > 1 << 20
        other.communicate("\n", timeout=PATIENCE)
    assert resident(other.pid) == 0
    assert 'shardmill_memory_bytes{process="engine"}' not in read(metrics)


def test_it_says_what_is_served_and_who_answers() -> None:
    metrics = Metrics()
    metrics.describe("demo", "portable", dict)
    result = GenerationResult((1,), "", "", "length", 1, 0, 1, (), (), (), 0, 0.0, 0.0, 0.0)
    for adapter in (None, "law", "law"):
        metrics.completed("none", result, adapter)
    told = read(metrics)
    assert told[f'shardmill_build_info{{engine="portable",model="demo",version="{__version__}"}}'] == 1
    assert told['shardmill_adapter_requests_total{adapter=""}'] == 1
    assert told['shardmill_adapter_requests_total{adapter="law"}'] == 2


def read(metrics: Metrics) -> dict[str, float]:
    """Values by their names and labels."""
    lines = (line for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
