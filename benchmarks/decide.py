"""Decisions a second: the probabilities of labels after texts, against writing a label token by token.

    python benchmarks/decide.py build/demo [--texts 24] [--length 60] [--instruction 200]

Every text stands after one instruction, which the session keeps, as a moderator's or a router's requests do. The texts
are pieces of `--file`, by default of Python's json module. "written" generates as many tokens as the longest label has.
Joules are printed where the system shows them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.bench.energy import start_meter
from shardmill.decode import LabelScores, Session, run, score_labels
from shardmill.machine import machine
from shardmill.serve.decide import split_labels
from shardmill.serve.engine_worker import DecideWork
from shardmill.serve.model import Model, load_model

LABELS: dict[str, tuple[str, ...]] = {
    "2 labels": ("yes", "no"),
    "4 labels": ("billing", "delivery", "returns", "something else"),
    "16 labels": tuple(f"category {i}: {word}" for i, word in enumerate(("text", "code", "table", "picture") * 4)),
}


@dataclass(frozen=True)
class Row:
    """What some texts took: seconds, joules if the system shows them, and engine calls."""

    seconds: float
    joules: float | None
    passes: int


def pieces(model: Model, file: Path, count: int, length: int, instruction: int) -> list[str]:
    """Return texts of `length` tokens, each after the same `instruction` tokens."""
    tokens = model.tokenizer.encode(file.read_text(encoding="utf-8")).ids
    if len(tokens) < instruction + count * length:
        raise SystemExit(f"{file} has {len(tokens)} tokens, {instruction + count * length} are needed")
    first = model.decode(tokens[:instruction])
    starts = range(instruction, instruction + count * length, length)
    return [f"{first}{model.decode(tokens[at : at + length])}\nAnswer: " for at in starts]


def measured(work: Sequence[DecideWork], answer: Callable[[DecideWork], int]) -> Row:
    """Return what answers take after the first one, which fills the cache; `answer` returns an answer's passes."""
    with start_meter() as meter:
        answer(work[0])
        joules, start = meter.joules() if meter.joules else 0.0, time.perf_counter()
        passes = sum(answer(one) for one in work[1:])
        seconds = time.perf_counter() - start
        return Row(seconds, meter.joules() - joules if meter.joules else None, passes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--file", type=Path, default=Path(json.decoder.__file__))
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--length", type=int, default=60, help="tokens of a text")
    parser.add_argument("--instruction", type=int, default=200, help="tokens before each text")
    args = parser.parse_args(arguments)
    model = load_model(args.build, None, "fp32")
    session = Session(model.engine)

    def decide(work: DecideWork) -> int:
        *_, last = score_labels(session, work.prompt, work.labels)
        assert isinstance(last, LabelScores)
        return last.passes

    def write(work: DecideWork) -> int:
        found = run(session, work.prompt, max_new_tokens=max(map(len, work.labels)))
        return found.prefill_passes + found.passes

    texts = pieces(model, args.file, args.texts + 1, args.length, args.instruction)
    print(json.dumps(machine()))
    print("| labels | tokens of the longest | | decisions a second | passes each | joules each |")
    print("|---|---|---|---|---|---|")
    for name, labels in LABELS.items():
        work = [split_labels(model, text, labels, special=True, most=model.engine.slots) for text in texts]
        longest = max(len(label) for one in work for label in one.labels)
        for how, answer in {"decided": decide, "written": write}.items():
            row = measured(work, answer)
            joules = "not shown" if row.joules is None else f"{row.joules / args.texts:.2f}"
            figures = f"{args.texts / row.seconds:.1f} | {row.passes / args.texts:.1f} | {joules}"
            print(f"| {name} | {longest} | {how} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
