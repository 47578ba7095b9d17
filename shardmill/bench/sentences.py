"""benchmark/speed.json of an encoder: sentences per second on this machine, and the time of a pass of each bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from shardmill import machine
from shardmill.bench.energy import Meter, start_meter
from shardmill.bench.speed import Say, conditions
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.config import Benchmark
from shardmill.errors import ShardmillError
from shardmill.files import read_named
from shardmill.runtime.encoder import Encoder, load_encoder
from shardmill.runtime.pack import packed_texts
from shardmill.runtime.threads import fastest_threads

Json = dict[str, Any]
WARM = 3  # passes; the fastest counts, as the first plans the program


def benchmark_encoder(build: Path, settings: Benchmark, precision: str, say: Say) -> Json:
    """Return the content of speed.json, as `speed.benchmark` does for a decoder; each line of the text is a sentence.

    Raises ShardmillError if the text has no sentence that fits.
    """
    began = time.perf_counter()
    encoder = load_encoder(build, precision)
    ready = time.perf_counter() - began
    tokenizer = read_tokenizer(build / encoder.manifest["tokenizer"]["path"])
    texts = [tokenizer.encode(line).ids for line in read_named(Path(settings.text)).splitlines() if line.strip()]
    fitting = [text for text in texts if 0 < len(text) <= encoder.longest]
    if not fitting:
        raise ShardmillError(f"{settings.text}: no line fits {encoder.longest} tokens: give a text of sentences")
    shortest = fitting[0]
    fastest_threads(lambda: min(_timed(lambda: encoder.run(shortest)) for _ in range(WARM)))
    say(f"{len(fitting)} sentences, {settings.repetitions} times")
    with start_meter() as energy:
        passes = [_pass_row(encoder, bucket, settings.repetitions) for bucket in sorted(encoder.programs)]
        sentences = _sentence_row(encoder, fitting, settings, energy)
    lost = len(texts) - len(fitting)
    gaps = [("prompt", f"{lost} lines", f"they have more than {encoder.longest} tokens")] if lost else []
    gaps += [("energy", "energy per sentence", energy.reason)] if energy.joules is None else []
    return {
        **conditions(precision, machine.threads() if machine.is_portable() else None),
        "settings": asdict(settings),
        "ready_seconds": ready,
        "passes": passes,
        "sentences": sentences,
        "not_run": [{"kind": kind, "what": what, "reason": reason} for kind, what, reason in gaps],
    }


def _pass_row(encoder: Encoder, bucket: int, repetitions: int) -> Json:
    """Measure a full pass of a bucket."""
    tokens = [0] * bucket
    encoder.run(tokens, bucket)  # plans the pass
    took = [_timed(lambda: encoder.run(tokens, bucket)) for _ in range(repetitions)]
    return {"bucket": bucket, "ms": 1e3 * median(took), "tokens_per_second": bucket / median(took)}


def _sentence_row(encoder: Encoder, texts: Sequence[Sequence[int]], settings: Benchmark, energy: Meter) -> Json:
    """Measure the sentences per second, with full passes and with one sentence a pass."""
    lengths = [len(text) for text in texts]
    passes = [[texts[i] for i in together] for together in packed_texts(lengths, encoder.longest)]
    before = energy.joules() if energy.joules else 0.0
    rates = _rates(lambda: [encoder.run_together(some) for some in passes], len(texts), settings.repetitions)
    used = energy.joules() - before if energy.joules else 0.0
    buckets = [encoder.bucket(length) for length in lengths]
    alone = _rates(lambda: [encoder.run(text) for text in texts], len(texts), settings.repetitions)
    return {
        "count": len(texts),
        "tokens": sum(lengths),
        "passes": len(passes),
        **rates,
        "mj_per_sentence": 1e3 * used / len(texts) / settings.repetitions if used else None,
        "alone": alone | {"by_bucket": {str(bucket): buckets.count(bucket) for bucket in sorted(set(buckets))}},
    }


def _rates(run: Callable[[], object], count: int, repetitions: int) -> Json:
    """Return the median and the range of the number per second."""
    rates = [count / _timed(run) for _ in range(repetitions)]
    return {"per_second": median(rates), "range": [min(rates), max(rates)]}


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
