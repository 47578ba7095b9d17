"""The counters that /metrics reports, in Prometheus' text format."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from drafted_decoding import GenerationResult, LabelScores, PrefixCache
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shardmill import __version__

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
SHARES = tuple(i / 10 for i in range(11))
TOKENS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 6, 8, 16)


class _PrefixCounts(Collector):
    """The counts of kept prefixes, which the cache itself holds."""

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        """Yield the counts as they are now."""
        prefixes, name = self._prefixes, "shardmill_prefix_cache"
        yield GaugeMetricFamily(f"{name}_bytes", "Bytes of kept prefixes.", prefixes.bytes)
        yield CounterMetricFamily(f"{name}_hits", "Prompts that went on from a kept prefix.", prefixes.hits)
        yield CounterMetricFamily(f"{name}_tokens", "Tokens of prompts that kept prefixes saved.", prefixes.recalled)
        yield CounterMetricFamily(f"{name}_evictions", "Copies that were freed for others.", prefixes.evicted)


class _Memory(Collector):
    """The resident memory of processes, whose numbers are asked for each time."""

    def __init__(self, processes: Callable[[], Mapping[str, int]]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        """Yield the memory of the processes that are there."""
        memory = GaugeMetricFamily("shardmill_memory_bytes", "Resident memory of a process.", labels=["process"])
        for name, process in self._processes().items():
            if size := resident(process):
                memory.add_metric([name], size)
        yield memory


def resident(process: int) -> int:
    """Return how many bytes a process has in memory; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux, or no such process
        said = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, check=False)
        return int(said.stdout.strip() or 0) * 1024


class Metrics:
    """The counters of one server, in a separate registry."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("shardmill_requests", "Requests answered.", ("endpoint", "status"), registry=registry)
        self.queued = Gauge("shardmill_queue_length", "Requests waiting for the engine.", registry=registry)
        self.running = Gauge("shardmill_running", "Requests that the engine works on.", registry=registry)
        self.turns = Counter("shardmill_turns", "Times that an answer let another run.", registry=registry)
        self.unsliced = Counter(
            "shardmill_unsliced", "Answers that could not let others run, for want of a copy.", registry=registry
        )
        self.set_aside_bytes = Gauge(
            "shardmill_set_aside_bytes", "Bytes of texts whose answers wait for a further turn.", registry=registry
        )
        self.tokens = Counter(
            "shardmill_tokens",
            "Tokens: prefilled, reused, generated.",
            ("kind",),
            registry=registry,
        )
        self.passes = Counter("shardmill_decode_passes", "Decode passes.", ("drafter",), registry=registry)
        self.drafted = Counter("shardmill_drafted_tokens", "Drafted tokens verified.", ("drafter",), registry=registry)
        self.accepted = Counter(
            "shardmill_accepted_tokens", "Drafted tokens accepted.", ("drafter",), registry=registry
        )
        self.adapters = Counter(
            "shardmill_adapter_requests", "Requests completed, by adapter.", ("adapter",), registry=registry
        )
        self.decisions = Counter("shardmill_decisions", "Texts whose labels were scored.", registry=registry)
        self.verified_again = Counter(
            "shardmill_tokens_verified_again",
            "Tokens whose two best logits were so close in a wide pass that they were run again alone.",
            ("drafter",),
            registry=registry,
        )
        self.acceptance = Histogram(
            "shardmill_acceptance_rate", "Share of a request's drafted tokens that were accepted.",
            ("drafter",), buckets=SHARES, registry=registry,
        )  # fmt: skip
        self.tokens_per_pass = Histogram(
            "shardmill_tokens_per_pass", "Tokens per decode pass of a request.",
            ("drafter",), buckets=TOKENS, registry=registry,
        )  # fmt: skip
        self.queue_seconds = self._seconds("shardmill_queue_seconds", "Wait for the engine.")
        self.first_token_seconds = self._seconds("shardmill_first_token_seconds", "From arrival to the first token.")
        self.request_seconds = self._seconds("shardmill_request_seconds", "From arrival to the last token.")
        self.token_seconds = Histogram(
            "shardmill_token_seconds", "Decoding time per token after the first.", buckets=PER_TOKEN, registry=registry
        )

    def completed(self, drafter: str, result: GenerationResult, adapter: str | None = None) -> None:
        """Count a completed request, which an adapter has answered or the bare model."""
        self.adapters.labels(adapter or "").inc()
        self.tokens.labels("prefilled").inc(result.prompt_tokens - result.reused_tokens)
        self.tokens.labels("reused").inc(result.reused_tokens)
        self.tokens.labels("generated").inc(len(result.tokens))
        self.passes.labels(drafter).inc(result.passes)
        self.drafted.labels(drafter).inc(sum(result.drafted))
        self.accepted.labels(drafter).inc(sum(result.accepted))
        self.verified_again.labels(drafter).inc(result.verified_again)
        if sum(result.drafted):
            self.acceptance.labels(drafter).observe(sum(result.accepted) / sum(result.drafted))
        if result.passes:
            self.tokens_per_pass.labels(drafter).observe(result.tokens_per_pass)
        if len(result.tokens) > 1:
            self.token_seconds.observe(result.decode_seconds / (len(result.tokens) - 1))

    def decided(self, scores: LabelScores) -> None:
        """Count a text whose labels were scored."""
        self.tokens.labels("prefilled").inc(scores.prompt_tokens - scores.reused_tokens)
        self.tokens.labels("reused").inc(scores.reused_tokens)
        self.decisions.inc()

    def watch(self, prefixes: PrefixCache) -> None:
        """Report the counts of kept prefixes."""
        self.registry.register(_PrefixCounts(prefixes))

    def describe(self, model: str, engine: str, processes: Callable[[], Mapping[str, int]]) -> None:
        """Report what is served, and the memory of processes by their names and numbers."""
        Info("shardmill_build", "What is served.", registry=self.registry).info(
            {"version": __version__, "model": model, "engine": engine}
        )
        self.registry.register(_Memory(processes))

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)

    def _seconds(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, buckets=SECONDS, registry=self.registry)
