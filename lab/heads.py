"""Tokens per pass of a build's own head on a text, against the drafters that need nothing but text.

    python lab/heads.py BUILD TEXT [--head FOLDER] [--prompts 12] [--json OUT.json]

The prompts are the beginnings of paragraphs of TEXT, spread over it, or the prompts of JSON Lines in the model's chat
template, or, if TEXT is a folder, the prompts of tasks in it. The head must not have been trained on them. Each is
continued greedily by the build's programs, live: a draft is what the programs make of what they computed. Every pass
verifies as many drafts as the cap allows. "cold" drafters know the request alone; `learned` is also measured "warm",
after all prompts have been answered once. The script fails if any drafter changes a token.

With --head nothing runs live, and the build needs no head: transformers writes the texts with the checkpoint in fp32,
and each drafter is asked what it would have drafted there.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from drafted_decoding import Drafter, GenerationResult, Session, create_drafter, run
from drafted_decoding.policies import AlwaysDraft
from shardmill_lab.draft.measure import CAPS, measure_acceptance
from shardmill_lab.draft.states import continued, embedding_table, load_reference
from shardmill_lab.draft.train import head_tokens
from shardmill_lab.draft.windows import WINDOW

from shardmill.bench.prompts import replay
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.commands.draft import encoded_prompts
from shardmill.files import read_json
from shardmill.gates.eagle3 import load_head
from shardmill.models.eagle3 import default_taps
from shardmill.runtime.drafter import load_drafter
from shardmill.runtime.engine import Engine, load

PROMPT, NEW = 64, 128  # tokens
WARM = "learned, warm"


def fresh_drafters() -> dict[str, Callable[[], Drafter]]:
    """Return what makes a drafter for a request, by its name, for each drafter that needs nothing but text."""
    learned = create_drafter("learned")
    made: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: create_drafter("ngram"),
        "suffix": lambda: create_drafter("suffix"),
        "learned, cold": lambda: create_drafter("learned"),
        WARM: lambda: learned,
    }
    return made


class Capped(AlwaysDraft):
    """A policy that verifies every draft, up to a cap."""

    def __init__(self, cap: int) -> None:
        self.cap = cap

    def limit(self, most: int) -> int:
        """See `AlwaysDraft`."""
        return min(most, self.cap)


@dataclass(frozen=True)
class Row:
    """The figures of one drafter at one cap; live, `seconds` of `wall` seconds of decoding are spent in the drafter."""

    drafter: str
    cap: int
    tokens: int
    passes: int
    drafted: int
    accepted: int
    seconds: float = 0.0
    wall: float = 1.0

    @property
    def tokens_per_pass(self) -> float:
        """Return emitted tokens per pass; the prompt's pass and its token are left out."""
        return self.tokens / self.passes


def prompts_of(build: Path, text: Path, count: int) -> list[list[int]]:
    """Return as many prompts, spread evenly over all prompts of a file or a folder of tasks."""
    tokenizer = read_tokenizer(build / "source/tokenizer.json")
    if text.is_dir():
        prompts = [tokenizer.encode(file.read_text().removesuffix("\n")).ids for file in sorted(text.glob("*/*.txt"))]
    elif text.suffix == ".jsonl":
        prompts = encoded_prompts(build / "source", text, WINDOW - NEW)
    else:
        paragraphs = [tokenizer.encode(one).ids[:PROMPT] for one in text.read_text(encoding="utf-8").split("\n\n\n")]
        prompts = [one for one in paragraphs if len(one) == PROMPT]
    if len(prompts) < count:
        raise SystemExit(f"{text} has {len(prompts)} prompts: ask for at most as many")
    return prompts[:: len(prompts) // count][:count]


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
    texts = answers(engine, prompts, make, cap)
    wall = time.perf_counter() - start
    drafted, accepted = (sum(sum(getattr(one, name)) for one in texts) for name in ("drafted", "accepted"))
    tokens, passes = sum(len(one.tokens) - 1 for one in texts), sum(one.passes for one in texts)
    seconds = sum(one.drafter_seconds for one in texts)
    return Row(name, cap, tokens, passes, drafted, accepted, seconds, wall), [one.tokens for one in texts]


def live(build: Path, prompts: Sequence[Sequence[int]]) -> list[Row]:
    """Return the figures of all drafters, and of none, with the build's programs."""
    engine = load(build, "fp32")
    if "drafter" not in engine.manifest or engine.verify <= max(CAPS):
        raise SystemExit(f"{build}: needs a head, and passes of {max(CAPS) + 1} tokens (tokens.max in its config)")
    head = load_drafter(engine)
    makers = {**fresh_drafters(), "eagle3": lambda: create_drafter("eagle3", head=head)}
    plain, texts = measured(engine, prompts, "none", lambda: create_drafter("none"), 0)
    answers(engine, prompts, makers[WARM], max(CAPS))
    rows = [plain]
    for name, make in makers.items():
        for cap in CAPS:
            row, same = measured(engine, prompts, name, make, cap)
            if same != texts:
                raise SystemExit(f"{name} at {cap} drafts has changed a text")
            rows.append(row)
    return rows


def replayed(build: Path, prompts: Sequence[Sequence[int]], folder: Path) -> list[Row]:
    """Return the figures of all drafters in texts that transformers writes, with the head of a folder."""
    model, plan, head = load_reference(build / "source"), read_json(build / "plan.json"), load_head(folder)
    window = max(map(len, prompts)) + NEW
    written = continued(model, prompts, default_taps(plan["architecture"]["layers"]), window)
    ends = torch.tensor([len(prompt) + NEW for prompt in prompts])
    texts = replace(written, own=written.own & (torch.arange(window) < ends[:, None]))
    outputs = [tokens[chosen].tolist() for tokens, chosen in zip(texts.tokens, texts.own, strict=True)]
    tokens, rows = sum(len(output) - 1 for output in outputs), []
    for name, make in fresh_drafters().items():
        if name == WARM:
            for prompt, output in zip(prompts, outputs, strict=True):
                replay(make(), prompt, output, max(CAPS))
        for cap in CAPS:
            replays = [replay(make(), prompt, output, cap) for prompt, output in zip(prompts, outputs, strict=True)]
            passes = sum(len(one.drafted) for one in replays)
            drafted, accepted = (sum(sum(getattr(one, each)) for one in replays) for each in ("drafted", "accepted"))
            rows.append(Row(name, cap, tokens, passes, drafted, accepted))
    acceptance = measure_acceptance(head, texts, embedding_table(model, plan), head_tokens(folder))
    for cap in CAPS:
        passes = round(tokens / acceptance.tokens_per_pass[str(cap)])
        rows.append(Row("eagle3", cap, tokens, passes, passes * cap, tokens - passes))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--head", type=Path, help="a head's folder: replay instead of running the build")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args(arguments)
    prompts = prompts_of(args.build, args.text, args.prompts)
    rows = replayed(args.build, prompts, args.head) if args.head else live(args.build, prompts)
    for row in rows:
        share = row.accepted / row.drafted if row.drafted else 0.0
        print(f"| {row.drafter} | {row.cap} | {row.tokens_per_pass:.2f} | {share:.0%} | {row.seconds / row.wall:.0%} |")
    if args.json:
        content = {"machine": platform.machine(), "prompts": len(prompts), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
