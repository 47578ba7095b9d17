"""Measures how fast a build's layers take a prompt in passes of one width and of another, without the LM head.

    python lab/prompt_passes.py BUILD [--widths 8 64] [--tokens 448] [--repeats 5]

The widths take turns, and the fastest turn of each counts. The last hidden states must agree, or the script fails.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from shardmill.runtime.engine import Engine, load
from shardmill.runtime.kv import Floats

LARGEST_ERROR = 1e-5  # of the last hidden state, relative, in fp32


def fed(engine: Engine, tokens: Sequence[int], width: int) -> Floats:
    """Return the hidden state [d] of the last token, after passes of `width` tokens."""
    engine.reset()
    for start in range(0, len(tokens), width):
        places = range(start, start + width)
        hidden = engine.hidden(tokens[start : start + width], places, places)
    return np.array(hidden[0, :, -1, 0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=448)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    engine = load(args.build, "fp32")
    torch.set_num_threads(1)
    tokens = np.random.default_rng(0).integers(0, engine.vocab, args.tokens).tolist()
    best, last = dict.fromkeys(args.widths, float("inf")), dict[int, Floats]()
    for _ in range(args.repeats):
        for width in args.widths:
            start = time.perf_counter()
            last[width] = fed(engine, tokens, width)
            best[width] = min(best[width], time.perf_counter() - start)
    first = last[args.widths[0]]
    for width, seconds in best.items():
        error = float(np.linalg.norm(last[width] - first) / np.linalg.norm(first))
        print(f"passes of {width}: {args.tokens / seconds:.0f} tokens a second; last hidden state within {error:.0e}")
        if error > LARGEST_ERROR:
            raise SystemExit(f"passes of {width} tokens give another hidden state")


if __name__ == "__main__":
    main()
