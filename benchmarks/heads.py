"""Tokens per pass of a build's own head on a text, against the drafters that need nothing but text.

    python benchmarks/heads.py BUILD TEXT [--prompts 12] [--json OUT.json]

The prompts are the beginnings of paragraphs of TEXT, spread over it; the head must not have been trained on them. Each
is continued greedily by the build's programs, live: a draft is what the programs make of what they computed. Every
pass verifies as many drafts as the cap allows. "cold" drafters know the request alone; `learned` is also measured
"warm", after all prompts have been answered once. The script fails if any drafter changes a token.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.decode import Drafter, GenerationResult, Session, create_drafter, run
from shardmill.decode.policies import AlwaysDraft
from shardmill.runtime.drafter import load_drafter
from shardmill.runtime.engine import Engine, load

PROMPT, NEW = 64, 128  # tokens
CAPS = (3, 7)


class Capped(AlwaysDraft):
    """A policy that verifies every draft, up to a cap."""

    def __init__(self, cap: int) -> None:
        self.cap = cap

    def limit(self, most: int) -> int:
        """See `AlwaysDraft`."""
        return min(most, self.cap)


@dataclass(frozen=True)
class Row:
    """The figures of one drafter at one cap; `seconds` are spent in the drafter, of `wall` seconds of decoding."""

    drafter: str
    cap: int
    tokens: int
    passes: int
    drafted: int
    accepted: int
    seconds: float
    wall: float

    @property
    def tokens_per_pass(self) -> float:
        """Return emitted tokens per pass; the prompt's pass and its token are left out."""
        return self.tokens / self.passes


def prompts_of(build: Path, text: str, count: int) -> list[list[int]]:
    """Return the beginnings of paragraphs, spread evenly over a text."""
    tokenizer = read_tokenizer(build / "source/tokenizer.json")
    paragraphs = [tokenizer.encode(one).ids[:PROMPT] for one in text.split("\n\n\n")]
    long = [one for one in paragraphs if len(one) == PROMPT]
    if len(long) < count:
        raise SystemExit(f"the text has {len(long)} paragraphs of {PROMPT} tokens or more: ask for at most as many")
    return long[:: len(long) // count][:count]


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], make: Callable[[], Drafter], cap: int
) -> list[GenerationResult]:
    """Return the continuation of every prompt; `make` gives the drafter for each."""
    session = Session(engine)
    return [run(session, prompt, max_new_tokens=NEW, drafter=make(), policy=Capped(cap)) for prompt in prompts]


def measured(
    engine: Engine, prompts: Sequence[Sequence[int]], name: str, make: Callable[[], Drafter], cap: int
) -> tuple[Row, list[tuple[int, ...]]]:
    """Return the figures of a drafter and the texts."""
    start = time.perf_counter()
    found = answers(engine, prompts, make, cap)
    wall = time.perf_counter() - start
    drafted, accepted = (sum(sum(getattr(one, name)) for one in found) for name in ("drafted", "accepted"))
    tokens, passes = sum(len(one.tokens) - 1 for one in found), sum(one.passes for one in found)
    seconds = sum(one.drafter_seconds for one in found)
    return Row(name, cap, tokens, passes, drafted, accepted, seconds, wall), [one.tokens for one in found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args(arguments)
    engine = load(args.build, "fp32")
    if "drafter" not in engine.manifest or engine.verify <= max(CAPS):
        raise SystemExit(f"{args.build}: needs a head, and passes of {max(CAPS) + 1} tokens (tokens.max in its config)")
    prompts = prompts_of(args.build, args.text.read_text(encoding="utf-8"), args.prompts)
    head, learned = load_drafter(engine), create_drafter("learned")
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: create_drafter("ngram"),
        "suffix": lambda: create_drafter("suffix"),
        "learned, cold": lambda: create_drafter("learned"),
        "learned, warm": lambda: learned,
        "eagle3": lambda: create_drafter("eagle3", head=head),
    }
    plain, texts = measured(engine, prompts, "none", lambda: create_drafter("none"), 0)
    answers(engine, prompts, makers["learned, warm"], max(CAPS))
    rows = [plain]
    for name, make in makers.items():
        for cap in CAPS:
            row, same = measured(engine, prompts, name, make, cap)
            if same != texts:
                raise SystemExit(f"{name} at {cap} drafts has changed a text")
            rows.append(row)
    for row in rows:
        share = row.accepted / row.drafted if row.drafted else 0.0
        print(f"| {row.drafter} | {row.cap} | {row.tokens_per_pass:.2f} | {share:.0%} | {row.seconds / row.wall:.0%} |")
    if args.json:
        content = {"machine": platform.machine(), "prompts": len(prompts), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
