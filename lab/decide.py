"""Measure decisions a second: the probabilities of labels after texts, against writing a label token by token.

    python lab/decide.py build/demo [--texts 24] [--length 60] [--instruction 200]

Every text stands after one instruction, which the session keeps, as a moderator's or a router's requests do. The texts
are pieces of `--file`, by default of Python's json module. "written" generates as many tokens as the longest label has.
If the config of the build has `program.labels`, these labels are decided too, by the whole LM head and by its rows for
them alone ("by labels' rows"). "MB read" are megabytes of weights that the passes read. Joules are printed where the
system shows them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drafted_decoding import LabelScores, Session, run, score_labels

from shardmill.bench.energy import start_meter
from shardmill.device.kit import weights_bytes
from shardmill.machine import machine
from shardmill.runtime.manifest import label_tokens, read_manifest
from shardmill.serve.decide import split_labels
from shardmill.serve.engine_worker import DecideWork
from shardmill.serve.model import Model, load_model

LABELS: dict[str, tuple[str, ...]] = {
    "2 labels": ("yes", "no"),
    "4 labels": ("billing", "delivery", "returns", "something else"),
    "16 labels": tuple(f"category {i}: {word}" for i, word in enumerate(("text", "code", "table", "picture") * 4)),
}
OWN = "the build's labels"


@dataclass(frozen=True)
class Row:
    """What some texts took: seconds, joules if the system shows them, engine calls, and bytes of weights read."""

    seconds: float
    joules: float | None
    passes: int
    read: int


class Reads:
    """The bytes of the weights that an engine's calls have read so far."""

    def __init__(self, build: Path, engine: Any) -> None:
        """Count the calls of an engine from now on. A call that needs no logits is taken to run all layers."""
        manifest, self.kinds = read_manifest(build), Counter[str]()
        for part in manifest["parts"]:
            self.kinds[part["kind"]] += weights_bytes(build / manifest["packages"][part["name"]]["path"])
        self.total, ends = 0, {"write": "none", "forward": "head", "forward_labels": "labels"}
        for name, end in ends.items():
            setattr(engine, name, partial(self._call, getattr(engine, name), end))

    def _call(self, call: Callable[..., Any], end: str, *arguments: Any) -> Any:
        self.total += self.kinds["layers"] + self.kinds[end]
        return call(*arguments)


def pieces(model: Model, file: Path, count: int, length: int, instruction: int) -> list[str]:
    """Return texts of `length` tokens, each after the same `instruction` tokens."""
    tokens = model.tokenizer.encode(file.read_text(encoding="utf-8")).ids
    if len(tokens) < instruction + count * length:
        raise SystemExit(f"{file} has {len(tokens)} tokens, {instruction + count * length} are needed")
    first = model.decode(tokens[:instruction])
    starts = range(instruction, instruction + count * length, length)
    return [f"{first}{model.decode(tokens[at : at + length])}\nAnswer: " for at in starts]


def measured(work: Sequence[DecideWork], answer: Callable[[DecideWork], int], reads: Reads) -> Row:
    """Return what answers take after the first one, which fills the cache; `answer` returns an answer's passes."""
    with start_meter() as meter:
        answer(work[0])
        joules, before, start = meter.joules() if meter.joules else 0.0, reads.total, time.perf_counter()
        passes = sum(answer(one) for one in work[1:])
        seconds = time.perf_counter() - start
        read = reads.total - before
        return Row(seconds, meter.joules() - joules if meter.joules else None, passes, read)


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
    session, reads = Session(model.engine), Reads(args.build, model.engine)

    def decide(work: DecideWork, logprobs: bool = True) -> int:
        *_, last = score_labels(session, work.prompt, work.labels, logprobs=logprobs)
        assert isinstance(last, LabelScores)
        return last.passes

    def write(work: DecideWork) -> int:
        generated = run(session, work.prompt, max_new_tokens=max(map(len, work.labels)))
        return generated.prefill_passes + generated.passes

    texts = pieces(model, args.file, args.texts + 1, args.length, args.instruction)
    print(json.dumps(machine()))
    print("| labels | tokens of the longest | | decisions a second | passes each | MB read each | joules each |")
    print("|---|---|---|---|---|---|---|")
    works = {
        name: [
            split_labels(model, text, labels, special=True, most=model.engine.slots, gone=lambda: False)
            for text in texts
        ]
        for name, labels in LABELS.items()
    }
    single = tuple((token,) for token in label_tokens(read_manifest(args.build)))
    works |= {OWN: [DecideWork(tuple(model.encode(text, special=True)), single) for text in texts]} if single else {}
    for name, work in works.items():
        longest = max(len(label) for one in work for label in one.labels)
        ways = {"decided": decide, "written": write}
        ways |= {"decided by labels' rows": partial(decide, logprobs=False)} if name == OWN else {}
        for how, answer in ways.items():
            row = measured(work, answer, reads)
            joules = "not shown" if row.joules is None else f"{row.joules / args.texts:.2f}"
            figures = f"{args.texts / row.seconds:.1f} | {row.passes / args.texts:.1f}"
            figures += f" | {row.read / args.texts / 1e6:.2f} | {joules}"
            print(f"| {name} | {longest} | {how} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
