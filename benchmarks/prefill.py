"""Measures on a built model what wide passes gain in feeding a prompt, against passes as narrow as decoding's.

    python benchmarks/prefill.py build/demo-wide --threads 2

`build/demo-wide` is a build whose tokens.max is over its tokens.verify. One prompt of code is fed with all of its
widths and with those of decoding alone, in turns, by the decoding loop that ships; each time some tokens are generated
after it, which must be the same. Prints one JSON object: prompt tokens per second of both, the median of the turns, the
median of the turns' ratios, in seconds and in CPU seconds of this process, which other work on the machine disturbs
less, whether all tokens were equal, and the milliseconds of a single pass by its width.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shardmill import machine
from shardmill.bench.prompts import tiled
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.decode import GenerationResult, PrefillEvent, Session, generate
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import read_manifest
from shardmill.runtime.process import load_engine


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--text", type=Path, default=Path("resources/text/code.txt"))
    parser.add_argument("--tokens", type=int, default=800, help="of the prompt")
    parser.add_argument("--new-tokens", type=int, default=40, help="generated after it, by which both are compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    args = parser.parse_args()
    tokenizer = read_tokenizer(args.build / read_manifest(args.build)["tokenizer"]["path"])
    (prompt,) = tiled(args.text, [args.tokens], lambda text: list(tokenizer.encode(text).ids))
    engine = load_engine(args.build, args.precision)
    machine.set_threads(args.threads)
    wide = engine.widths
    narrow = tuple(width for width in wide if width <= engine.verify)
    turns: list[list[Fed]] = []
    for turn in range(args.repeats + 1):  # the first does not count
        pair = [fed(engine, widths, prompt.tokens, args.new_tokens) for widths in (narrow, wide)]
        turns += [pair] if turn else []
    speeds = [median(args.tokens / pair[i].result.prefill_seconds for pair in turns) for i in (0, 1)]
    ratios = [slow.result.prefill_seconds / quick.result.prefill_seconds for slow, quick in turns]
    report = {
        "threads": args.threads,
        "precision": args.precision,
        "prompt_tokens": args.tokens,
        "narrow": {
            "widths": narrow,
            "passes": turns[0][0].result.prefill_passes,
            "tokens_per_second": round(speeds[0], 1),
        },
        "wide": {"widths": wide, "passes": turns[0][1].result.prefill_passes, "tokens_per_second": round(speeds[1], 1)},
        "ratio": round(median(ratios), 2),
        "cpu_ratio": round(median(slow.cpu_seconds / quick.cpu_seconds for slow, quick in turns), 2),
        "tokens_equal": len({one.result.tokens for pair in turns for one in pair}) == 1,
        "pass_ms": pass_milliseconds(engine, wide, args.tokens // 2, args.repeats),
    }
    print(json.dumps(report, indent=2))


@dataclass(frozen=True)
class Fed:
    """A prompt fed, and the greedy text after it; the CPU seconds are the prompt's."""

    result: GenerationResult
    cpu_seconds: float


def fed(engine: Engine, widths: tuple[int, ...], prompt: Sequence[int], new_tokens: int) -> Fed:
    """Feed a prompt with these widths from the start."""
    engine.widths = widths
    start, spent = time.process_time(), 0.0
    for event in generate(Session(engine), prompt, max_new_tokens=new_tokens):
        if isinstance(event, PrefillEvent):
            spent = time.process_time() - start
    assert isinstance(event, GenerationResult)
    return Fed(event, spent)


def pass_milliseconds(engine: Engine, widths: Sequence[int], at: int, repeats: int) -> dict[int, float]:
    """Time passes of each width from a position on, in turns, without the head; return the shortest of each."""
    best = dict.fromkeys(widths, float("inf"))
    for _ in range(4 * repeats):
        for width in widths:
            positions = range(at, at + width)
            start = time.perf_counter()
            engine.write([0] * width, positions, positions)
            best[width] = min(best[width], 1e3 * (time.perf_counter() - start))
    return {width: round(milliseconds, 2) for width, milliseconds in best.items()}


if __name__ == "__main__":
    main()
