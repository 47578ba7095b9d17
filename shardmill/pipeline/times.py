"""How long jobs take on this machine: from their sizes, a measurement of the processor, and what builds took before.

`COSTS` has what jobs took on one machine (`REFERENCE`), in seconds of CPU time. A measurement of half a second says
how much faster or slower this machine is, in Python and in sums. Every job of a build then corrects its step's costs.
Both are kept in the user's cache, by processor and engine. What Core ML takes no CPU time tells: a step that loads
programs there is known only from an earlier build, by the clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.files import cache_folder, json_object, write_json
from shardmill.machine import cores, engine, is_portable, machine
from shardmill.models import ENCODER

if TYPE_CHECKING:
    from shardmill.config import Config

MILLION = 1_000_000


@dataclass(frozen=True)
class Cost:
    """Seconds of CPU time of a step's job, on the reference machine.

    Attributes:
        base: of any job; imports, mostly.
        layer: for each layer of the job's part, or of the model.
        weights: for each million parameters of its part, or of the model.
        vocab: for each million tokens of the vocabulary, of which reading a tokenizer consists.
        each: whether there is a job for each part.
    """

    base: float
    layer: float = 0.0
    weights: float = 0.0
    vocab: float = 0.0
    each: bool = False


COSTS = {
    "fetch": Cost(0.4, weights=0.0015, vocab=5),
    "split": Cost(2.1, vocab=12),
    "precision": Cost(0.2),
    "reference": Cost(3.3, weights=0.02),
    "embedding": Cost(1.1, weights=0.004),
    "convert": Cost(0.4, layer=0.03, weights=0.01, each=True),
    "expected": Cost(2.5, weights=0.02),
    "compile": Cost(0.7, weights=0.006, each=True),
    "residency": Cost(0.15, layer=0.04, each=True),
    "parity": Cost(0.5, layer=0.16, weights=0.1, each=True),
    "parity_stack": Cost(1.0, layer=0.28, weights=0.165),
    "manifest": Cost(0.2, vocab=3.7),
    "provenance": Cost(0.5),
    "report": Cost(1.2),
}
PASS = Cost(0.001, layer=0.0003, weights=0.00027)  # of the benchmark, beside SERVER
SERVER = Cost(5.0, weights=0.06)  # until the benchmark's server answers
STARTED = 0.3  # seconds that Snakemake and a new process take for a job
WHOLE = Cost(3.0, layer=0.2, weights=0.01, each=True)  # of an encoder's conversion
UNKNOWN = Cost(20.0)  # of a step that only few builds have
LOADING = ("residency", "parity", "parity_stack", "witness", "benchmark")  # steps that load programs
DRAFTED = 0.5  # passes of a request with drafts, as a share of the passes without
TASK_TOKENS = 100  # of a task's prompt, about
TEXTS = 140  # passes of an encoder's benchmark for each bucket and repetition
FADES = 0.5  # what a step's earlier jobs count beside the next one
LAST = ("manifest", "provenance", "benchmark", "report")  # after all others, one by one


@dataclass(frozen=True)
class Speed:
    """How fast a machine is: seconds for the work of `measured`, of each kind."""

    python: float
    sums: float

    def of(self, cost: Cost, layers: float, weights: float, vocab: float) -> float:
        """Return the seconds of a job here, given its layers, its millions of parameters and of tokens."""
        python = (cost.base + STARTED + cost.layer * layers + cost.vocab * vocab) * self.python / REFERENCE.python
        return python + cost.weights * weights * self.sums / REFERENCE.sums


REFERENCE = Speed(python=0.0280, sums=0.0166)  # of one of two cores of an AMD EPYC with AVX-512


def measured() -> Speed:
    """Return the speed of this machine, the best of a few tries of some hundredths of a second each."""
    import numpy as np

    matrix, column = np.ones((2048, 2048), np.float32), np.ones(2048, np.float32)

    def python() -> None:
        sum(number * number % 7 for number in range(500_000))

    def sums() -> None:
        for _ in range(20):
            np.einsum("ij,j->i", matrix, column)  # not by BLAS, which may start threads

    def seconds(work: Callable[[], None]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    return Speed(*(min(seconds(work) for _ in range(4)) for work in (python, sums)))


@dataclass(frozen=True)
class Sizes:
    """What a model's costs follow from.

    Attributes:
        parts: layers and millions of parameters of each program, by name.
        vocab: millions of tokens in the vocabulary.
        passes: of its benchmark; 0 without one.
        encodes: whether it is an encoder, which is converted whole.
    """

    parts: Mapping[str, tuple[float, float]]
    vocab: float
    passes: float
    encodes: bool = False

    @property
    def whole(self) -> tuple[float, float]:
        """Return the layers and millions of parameters of all programs."""
        layers, weights = zip(*self.parts.values(), strict=True)
        return sum(layers), sum(weights)


def sizes(plan: Mapping[str, Any], config: Config) -> Sizes:
    """Return the sizes of a model from as much of plan.json as `resolve.expected` gives.

    A part has as many layers as its share of all layers' parameters.
    """
    layers, rows = plan["architecture"]["layers"], plan["parts"]
    total = sum(row["parameters"] for row in rows if row["kind"] in ("layers", "experts", "encoder"))
    total /= max(len(plan.get("buckets", ())), 1)  # each bucket of an encoder has all layers

    def depth(row: Mapping[str, Any]) -> float:
        return layers * row["parameters"] / total if row["kind"] in ("layers", "experts", "encoder") and total else 0.0

    parts = {row["name"]: (depth(row), row["parameters"] / MILLION) for row in rows if row["kind"] != "embedding"}
    return Sizes(parts, plan["architecture"]["vocab"] / MILLION, _passes(config), config.kind == ENCODER)


def _passes(config: Config) -> float:
    """Return about how many passes a model's benchmark takes."""
    asked = config.benchmark
    if not asked:
        return 0.0
    tasks = len(asked.tasks) * asked.prompts_per_task
    if config.kind == ENCODER:
        return float(TEXTS * len(config.sizes) * asked.repetitions)
    lengths = [n for n in asked.prompt_tokens if n + asked.new_tokens <= config.length]
    requests = (len(lengths) + tasks) * len(asked.drafters) * asked.repetitions
    prompts = (sum(lengths) + tasks * TASK_TOKENS) / config.tokens.max
    return requests * asked.new_tokens * (1 + DRAFTED) + prompts


@dataclass
class Times:
    """The times of jobs on this machine.

    Attributes:
        speed: of the machine.
        learned: by step, the seconds that were expected of jobs, and the seconds that they took.
        clock: whether programs run on Core ML, which uses little CPU time of ours.
        file: where speed and corrections are kept.
    """

    speed: Speed
    learned: dict[str, tuple[float, float]]
    clock: bool
    file: Path

    def expected(self, step: str, part: str, of: Sizes) -> float:
        """Return the seconds of a job by the table and the speed of the machine alone."""
        if step == "benchmark":
            layers, weights = of.whole
            one = self.speed.of(PASS, layers, weights, 0) - self.speed.of(Cost(0), 0, 0, 0)
            return self.speed.of(SERVER, layers, weights, 0) + of.passes * one
        cost = WHOLE if step == "convert" and of.encodes else COSTS.get(step, UNKNOWN)
        layers, weights = of.parts.get(part, of.whole) if cost.each else of.whole
        return self.speed.of(cost, layers, weights, of.vocab)

    def seconds(self, step: str, part: str, of: Sizes) -> float | None:
        """Return the seconds that a job takes, corrected by the jobs that ran here.

        None for a job whose step loads programs on Core ML, if no such job has run here.
        """
        estimate = self.expected(step, part, of)
        expected, took = self.learned.get(step, (0.0, 0.0))
        if self.clock and step in LOADING and not took:
            return None
        return estimate * took / expected if took else estimate

    def learn(self, step: str, expected: float, took: float) -> None:
        """Remember what a job took; what is older counts less and less."""
        before = self.learned.get(step, (0.0, 0.0))
        self.learned[step] = (before[0] * FADES + expected, before[1] * FADES + took)

    def keep(self) -> None:
        """Write what was measured and learned into the user's cache, if that can be written."""
        with suppress(OSError):
            known = json_object(self.file)
            known[_identity()] = {"python": self.speed.python, "sums": self.speed.sums, "steps": self.learned}
            write_json(self.file, known)


def times() -> Times:
    """Return what is known of this machine; it is measured the first time, which takes half a second."""
    file = cache_folder() / "speed.json"
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        known = json_object(file)[_identity()]
        learned = {str(step): (float(a), float(b)) for step, (a, b) in known["steps"].items()}
        return Times(Speed(float(known["python"]), float(known["sums"])), learned, not is_portable(), file)
    fresh = Times(measured(), {}, not is_portable(), file)
    fresh.keep()
    return fresh


def _identity() -> str:
    """Return the name under which this machine's times are kept: its processor, cores and engine."""
    here = machine()
    return f"{here['processor']}, {here['cores']} cores, {', '.join(engine().values())}"


def busy() -> float:
    """Return how many processes of others want a core now, as far as the system tells."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return 0.0


def span(jobs: Iterable[tuple[str, float]], at_once: int, others: float = 0.0) -> float:
    """Return the seconds for jobs, each with its step: side by side, then those of `LAST` one after the other.

    Args:
        jobs: steps and seconds of CPU time.
        at_once: the most jobs that run at a time.
        others: processes beside them that want a core, too.
    """
    rows = [*jobs]
    early = [seconds for step, seconds in rows if step not in LAST]
    last = sum(seconds for step, seconds in rows if step in LAST)
    together = sum(early) / _share(max(1, min(at_once, len(early))), others)
    return max(together, max(early, default=0.0) / _share(1, others)) + last / _share(1, others)


def _share(processes: int, others: float) -> float:
    """Return how many of the cores here processes get beside others."""
    return min(processes, cores() * processes / max(cores(), processes + others))


def others_beside(slowness: float, at_once: int) -> float:
    """Return how many processes of others there are where so many jobs take so many times their CPU time."""
    return max(0.0, slowness * cores() - at_once)
