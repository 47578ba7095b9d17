"""The time to the first token when conversations take turns, with kept prefixes and without.

    python lab/prefixes.py BUILD [--shared 2000] [--agents 2] [--conversations 8] [--turns 3]

Every agent has instructions of `--shared` tokens, and every conversation begins with the instructions of an agent. In
each turn a conversation adds 20 tokens to its text and gets 8, and then another agent's conversation is next. "one
prefix" is a session that has only the text of the last request. The script fails if any answer differs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from drafted_decoding import GenerationResult, PrefillEvent, PrefixCache, Session, generate

from shardmill.machine import machine
from shardmill.runtime.process import start_engine

ADDED, NEW = 20, 8  # tokens of a turn: the user's and the model's


@dataclass(frozen=True)
class Turn:
    """An answer, the seconds to its first token and to its end, and how many tokens of its prompt were computed."""

    tokens: tuple[int, ...]
    first: float
    whole: float
    computed: int


def asked(session: Session, prompt: Sequence[int]) -> Turn:
    """Return the answer to a prompt."""
    start = time.perf_counter()
    first = 0.0
    for event in generate(session, prompt, max_new_tokens=NEW):
        if not first and not isinstance(event, PrefillEvent):
            first = time.perf_counter() - start
    assert isinstance(event, GenerationResult)
    return Turn(event.tokens, first, time.perf_counter() - start, len(prompt) - event.reused_tokens)


def conversations(session: Session, shared: Sequence[Sequence[int]], count: int, turns: int) -> list[Turn]:
    """Return the turns of conversations that take turns; conversation i has the instructions i modulo their number."""
    rng = random.Random(1)
    texts = [list(shared[i % len(shared)]) for i in range(count)]
    taken = []
    for _ in range(turns):
        for text in texts:
            text.extend(rng.randrange(1, session.engine.vocab) for _ in range(ADDED))
            taken.append(asked(session, text))
            text.extend(taken[-1].tokens)
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--shared", type=int, default=2000)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--agents", type=int, default=2, help="how many different instructions there are")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="the budget of the copies")
    args = parser.parse_args(arguments)
    engine = start_engine(args.build, "fp32")
    longest = args.shared + args.turns * (ADDED + NEW) + engine.verify
    if longest > engine.slots:
        raise SystemExit(f"{args.build}: a context of {engine.slots}, and {longest} are needed: ask for fewer turns")
    rng = random.Random(0)
    shared = [[rng.randrange(1, engine.vocab) for _ in range(args.shared)] for _ in range(args.agents)]
    prefixes = PrefixCache(engine, args.bytes)
    before = conversations(Session(engine), shared, args.conversations, args.turns)
    after = conversations(Session(engine, prefixes=prefixes), shared, args.conversations, args.turns)
    if [turn.tokens for turn in before] != [turn.tokens for turn in after]:
        raise SystemExit("kept prefixes have changed an answer")
    print(json.dumps(machine()))
    print("| | first token, ms | turns a second | tokens computed of a prompt |")
    print("|---|---|---|---|")
    firsts = []
    for name, turns in {
        "one prefix": before[args.agents :],
        "kept prefixes": after[args.agents :],
    }.items():  # then all is known
        firsts.append(median(turn.first for turn in turns))
        speed, computed = len(turns) / sum(turn.whole for turn in turns), median(turn.computed for turn in turns)
        print(f"| {name} | {1000 * firsts[-1]:.0f} | {speed:.2f} | {computed:.0f} |")
    print(
        f"{firsts[0] / firsts[1]:.1f} times as soon; {prefixes.bytes / 2**20:.0f} MiB of copies, {prefixes.hits} hits"
    )


if __name__ == "__main__":
    main()
