"""Does a built model say what its checkpoint says, at the cost in perplexity that its gate promises?

    python lab/real_models.py build/MODEL TEXT_FILE [--tokens 20000] [--prompts 20] [--new-tokens 100]

Two answers. Text: greedy tokens with the ngram drafter, in fp32, against those of transformers in fp32 with the weights
as the packages hold them; no token ends a text. Perplexity: the build as shipped (those weights, fp16 arithmetic)
against the original checkpoint in transformers and fp32, both on the same windows of the build's context. Windows do
not overlap (the stride is the window) and each begins as the tokenizer begins a text, with <bos> where it has one; the
first token of a window is not counted. The exit code is 1 if a text differs or the ratio is more than 1 % off.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from drafted_decoding import Session, create_drafter, create_policy, run
from exactness import manifest, prompts, witness

from shardmill import machine
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.imports import quiet_coremltools
from shardmill.runtime.engine import Engine

MOST = 0.01  # that the ratio of the perplexities may be away from one
ROWS = 64  # positions whose logits transformers computes at a time


def load(build: Path, precision: str) -> Engine:
    """Return the built model."""
    with quiet_coremltools(), machine.load_programs_as(precision):
        return Engine(manifest(build), build)


def texts(build: Path, folder: Path, count: int, new_tokens: int) -> dict[str, Any]:
    """Return how many greedy texts are transformers', and what drafting won on the way."""
    session, drafter = Session(load(build, "fp32")), create_drafter("ngram")
    policy = create_policy("always", session.widths)
    equal = passes = 0
    greedy = witness(build)
    wanted = prompts(build, folder, count, session.engine.slots - new_tokens)
    for index, (task, prompt) in enumerate(wanted):
        result = run(session, prompt, max_new_tokens=new_tokens, drafter=drafter, policy=policy)
        passes += result.passes
        same = list(result.tokens) == greedy(prompt, new_tokens)
        equal += same
        say(f"{index + 1} of {len(wanted)}, {task}, {len(prompt)} tokens: {'equal' if same else 'DIFFERENT'}")
    decoded = len(wanted) * (new_tokens - 1)  # the first token is the prompt's
    return {"prompts": len(wanted), "equal": equal, "new_tokens": new_tokens, "tokens_per_pass": decoded / passes}


def windows(build: Path, text: Path, count: int, size: int) -> Iterator[list[int]]:
    """Yield the text's first tokens, cut; every window begins as the tokenizer begins a text."""
    tokenizer = read_tokenizer(build / manifest(build)["tokenizer"]["path"])
    opening: list[int] = tokenizer.encode("").ids
    content = text.read_text(encoding="utf-8")
    tokens: list[int] = tokenizer.encode(content, add_special_tokens=False).ids[:count]
    room = size - len(opening)
    for start in range(0, len(tokens) - 1, room):
        yield [*opening, *tokens[start : start + room]]


def shipped_loss(engine: Engine, tokens: Sequence[int]) -> float:
    """Return the sum of -log p(token) over a window but its first, in the widest passes."""
    engine.reset()
    total, width = 0.0, engine.tokens_max
    for start in range(0, len(tokens) - 1, width):
        at = range(start, min(start + width, len(tokens) - 1))
        rows = engine.forward([tokens[i] for i in at], at, at).astype(np.float64)  # [T, vocab]
        chosen = rows[np.arange(len(at)), [tokens[i + 1] for i in at]]
        most = rows.max(axis=1)
        total += float((most + np.log(np.exp(rows - most[:, None]).sum(axis=1)) - chosen).sum())
    return total


def original_loss(model: Any, tokens: Sequence[int]) -> float:
    """Return the summed loss of the next tokens by transformers."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state[0]  # [n, d]
        return sum(
            float(cross_entropy(model.lm_head(rows), targets, reduction="sum"))
            for rows, targets in zip(hidden[:-1].split(ROWS), ids[0, 1:].split(ROWS), strict=True)
        )


def perplexity(build: Path, text: Path, count: int) -> dict[str, Any]:
    """Return both perplexities on the same windows."""
    import torch
    from transformers import AutoModelForCausalLM

    cut = list(windows(build, text, count, manifest(build)["context"]))
    counted = sum(len(window) - 1 for window in cut)
    model = AutoModelForCausalLM.from_pretrained(build / "source", dtype=torch.float32).eval()
    before = math.exp(sum(original_loss(model, window) for window in cut) / counted)
    del model
    say(f"transformers: {before:.4f}")
    engine = load(build, "fp16")
    began = time.perf_counter()
    after = math.exp(sum(shipped_loss(engine, window) for window in cut) / counted)
    seconds = time.perf_counter() - began
    return {
        "tokens": counted,
        "windows": len(cut),
        "original": before,
        "shipped": after,
        "ratio": after / before,
        "tokens_per_second": counted / seconds,
    }


def say(line: str) -> None:
    """Print how far the run is."""
    print(line, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of a built model")
    parser.add_argument("text", type=Path, help="UTF-8 text for the perplexity")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text; 0: no perplexity")
    parser.add_argument("--prompts", type=int, default=20, help="greedy texts; 0: none")
    parser.add_argument("--new-tokens", type=int, default=100, help="of each")
    parser.add_argument("--tasks", type=Path, default=Path("resources/tasks"), help="folder of prompts by task")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object."""
    args = parse(arguments)
    report: dict[str, Any] = {"machine": machine.machine()}
    if args.prompts:
        report["texts"] = texts(args.build, args.tasks, args.prompts, args.new_tokens)
    if args.tokens:
        report["perplexity"] = perplexity(args.build, args.text, args.tokens)
    print(json.dumps(report, indent=2))
    same = not args.prompts or report["texts"]["equal"] == report["texts"]["prompts"]
    near = not args.tokens or abs(report["perplexity"]["ratio"] - 1) <= MOST
    return int(not (same and near))


if __name__ == "__main__":
    sys.exit(main())
