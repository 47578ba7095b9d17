"""What the reported arithmetic of the Neural Engine would cost a model, with SiLU in both spellings: a prediction.

usage: python benchmarks/ane_arithmetic.py CHECKPOINT [--tokens 64] [--precisions fp16 ane ...]

Converts the checkpoint twice in INT8, with `program.silu: native` and `tanh`, and runs the programs on the portable
engine. In each precision the text's logits are compared with those of the native programs in fp32. Greedy tokens of the
two builds in fp32 are compared with each other.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from forms import Made, made

from shardmill.checkpoint.fetch import fetch
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.decode import Session, run
from shardmill.gates.passes import in_passes
from shardmill.gates.stack import feed
from shardmill.imports import quiet_coremltools
from shardmill.machine import load_programs_as
from shardmill.models.host import Floats
from shardmill.runtime.engine import Engine

ROOT = Path(__file__).parents[1]
PRECISIONS = ("fp16", "ane:tables", "ane:sums,scales", "ane")
CONTEXT, WIDTH, CUT, NEW = 256, 4, 16, 24  # slots, tokens of a pass, tokens of a prompt, new tokens


def logits(build: Made, precision: str, tokens: list[int]) -> Floats:
    """Return the logits [n, vocab] of a text."""
    with quiet_coremltools(), load_programs_as(precision):
        engine = Engine(build.manifest, Path("/"))
    return feed(engine, tokens, in_passes(len(tokens), [WIDTH]))


def divergence(truth: Floats, found: Floats) -> float:
    """Return the mean KL divergence of the next tokens' distributions."""
    p, q = (x - np.logaddexp.reduce(x, -1)[:, None] for x in (truth.astype(np.float64), found.astype(np.float64)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def greedy(build: Made, tokens: list[int]) -> list[int]:
    """Return what follows prompts cut from a text, in fp32."""
    session, found = Session(build.engine()), list[int]()
    for first in range(0, len(tokens), CUT):
        session.truncate(0)
        found += run(session, tokens[first : first + CUT], max_new_tokens=NEW).tokens
    return found


def main() -> None:
    """Print a line for each spelling and precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    options = parser.parse_args()
    text = (ROOT / "resources/text/parity.txt").read_text()
    tokens = read_tokenizer(options.checkpoint / "tokenizer.json").encode(text).ids[: options.tokens]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        fetch(path=options.checkpoint, repo=None, revision=None, dest=source, cache=None)
        builds: dict[str, Made] = {}
        for silu in ("native", "tanh"):
            folder, program = Path(scratch) / silu, dict[str, Any](silu=silu)
            folder.mkdir()
            builds[silu] = made(source, folder, program, CONTEXT)
        truth = logits(builds["native"], "fp32", tokens)
        for precision in ("fp32", *options.precisions):
            for silu, build in builds.items():
                start = time.monotonic()
                found = logits(build, precision, tokens)
                same = float((found.argmax(-1) == truth.argmax(-1)).mean())
                error = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
                figures = f"top-1 {same:.3f}, KL {divergence(truth, found):.2e}, logits off by {error:.2e}"
                took = f"{len(tokens)} tokens, {time.monotonic() - start:.0f} s"
                print(f"{precision:16} {silu:6} {figures} ({took})", flush=True)
        one, other = (greedy(build, tokens) for build in builds.values())
        print(f"greedy in fp32: {sum(a != b for a, b in zip(one, other, strict=True))} of {len(one)} tokens differ")


if __name__ == "__main__":
    main()
