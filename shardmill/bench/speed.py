"""T=1 decode, T=max chunked prefill and n-gram speculation of one resident engine, on prompts of several lengths.

The prompts are one dense code text tiled to length, as in the experiment this follows: the best case for n-grams, and
said so. Every number is a median over repetitions; the speculated tokens are compared with those of plain decoding.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardmill.decode import Engine, GenerationResult, Session, create_drafter, run


@dataclass(frozen=True)
class Row:
    """One prompt length."""

    prompt_tokens: int
    new_tokens: int
    decode_tok_s: float  # T = 1
    prefill_tok_s: float  # T = upper bound
    ngram_tok_s: float
    speedup: float  # of n-gram speculation over T = 1
    tokens_per_pass: float
    acceptance: float  # drafted tokens that were accepted
    exact: bool  # the same tokens as T = 1
    stops: str  # why generation ended


def fastest_threads(engine: Engine, set_threads: Callable[[int], None]) -> int:
    """Of 1, 2, 4 ... threads, the number with which a pass is quickest: small models lose by sharing their work."""
    most = os.cpu_count() or 1
    took = {}
    for threads in (n for n in (1, 2, 4, 8, 16) if n <= most):
        set_threads(threads)
        took[threads] = min(seconds_for_passes(engine) for _ in range(3))
    return min(took, key=lambda threads: took[threads])


def seconds_for_passes(engine: Engine, passes: int = 4) -> float:
    """Time of a few one-token passes."""
    engine.reset()
    start = time.perf_counter()
    for position in range(passes):
        engine.forward([0], [position], [position])
    return time.perf_counter() - start


def tile(tokens: Sequence[int], length: int) -> list[int]:
    """The text repeated and cut to `length` tokens."""
    return (list(tokens) * (length // len(tokens) + 1))[:length]


def generate_once(session: Session, prompt: Sequence[int], new_tokens: int, drafter: str) -> GenerationResult:
    """One request. A session that holds the prompt already does not run it again."""
    return run(session, prompt, max_new_tokens=new_tokens, drafter=create_drafter(drafter))


def measure(engine: Engine, text: Sequence[int], length: int, new_tokens: int, repetitions: int) -> Row:
    """Medians for one prompt length. The two kinds of decoding take turns, so that a slow moment hits both."""
    prompt = tile(text, length)
    plain, drafted = [], []
    for _ in range(repetitions):
        session = Session(engine)
        plain.append(generate_once(session, prompt, new_tokens, "none"))
        drafted.append(generate_once(session, prompt, new_tokens, "ngram"))
    decode = statistics.median(speed(r) for r in plain)
    ngram = statistics.median(speed(r) for r in drafted)
    last = drafted[-1]
    return Row(
        prompt_tokens=length,
        new_tokens=len(last.tokens),
        decode_tok_s=decode,
        prefill_tok_s=statistics.median(r.prompt_tokens / r.prefill_seconds for r in plain),
        ngram_tok_s=ngram,
        speedup=ngram / decode,
        tokens_per_pass=last.tokens_per_pass,
        acceptance=sum(last.accepted) / max(sum(last.drafted), 1),
        exact=all(r.tokens == plain[0].tokens for r in (*plain, *drafted)),
        stops=last.finish_reason,
    )


def speed(result: GenerationResult) -> float:
    """Decoded tokens per second; the first token comes out of the prefill."""
    return (len(result.tokens) - 1) / result.decode_seconds


def sweep(engine: Engine, text: Sequence[int], settings: Any) -> dict[str, Any]:
    """All prompt lengths that the context has room for, after a warm-up; lengths without room are named."""
    room = engine.slots - settings.new_tokens - max(engine.widths)
    fitting = [n for n in settings.prompt_tokens if n <= room]
    for drafter in ("none", "ngram") if fitting else ():
        generate_once(Session(engine), tile(text, min(64, room)), 8, drafter)
    rows = [measure(engine, text, n, settings.new_tokens, settings.repetitions) for n in fitting]
    return {
        "rows": [asdict(row) for row in rows],
        "prefill_over_decode": statistics.median(r.prefill_tok_s / r.decode_tok_s for r in rows) if rows else None,
        "not_run": {
            str(n): f"context has room for {max(room, 0)} prompt tokens" for n in settings.prompt_tokens if n > room
        },
    }
