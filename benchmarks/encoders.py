"""Sentences per second of a finished encoder's build against transformers, eager, in one run and on the same threads.

    python benchmarks/encoders.py build/privacy-filter [--text FILE] [--times 5] [--threads 1] [--rounds 3]

Both compute in fp32, and take turns. Ours puts as many sentences into a pass as its largest bucket takes; transformers
gets them one by one, and then all of them as one padded batch. The rows that both make are compared as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from convert import machine

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.models.buckets import packed_texts
from shardmill.runtime import engine as runtime

ROOT = Path(__file__).parents[1]
CLASSES = {
    "token-classification": "AutoModelForTokenClassification",
    "text-classification": "AutoModelForSequenceClassification",
    "feature-extraction": "AutoModel",
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--text", type=Path, default=ROOT / "resources/text/sentences.txt", help="a sentence a line")
    parser.add_argument("--times", type=int, default=1, help="the text so many times over")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    encoder = runtime.load_encoder(args.build, "fp32")
    tokenizer = read_tokenizer(args.build / encoder.manifest["tokenizer"]["path"])
    lines = [line for line in args.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [tokenizer.encode(line).ids for line in lines] * args.times
    model = _theirs(args.build / "source", encoder.manifest["task"])
    passes = [[texts[i] for i in some] for some in packed_texts([len(text) for text in texts], encoder.longest)]
    ways: dict[str, Callable[[], Any]] = {
        "ours_together": lambda: [encoder.run_together(some) for some in passes],
        "ours_one_by_one": lambda: [encoder.run(text) for text in texts],
        "transformers_one_by_one": lambda: [_rows(model, text) for text in texts],
        "transformers_batch": lambda: _batch(model, texts),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # plans, and reads weights
    for _ in range(args.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - began)
    rates = {name: len(texts) / median(seconds) for name, seconds in took.items()}
    differences = [
        float(np.abs(rows - _rows(model, text)).max())
        for some in passes
        for rows, text in zip(encoder.run_together(some), some, strict=True)
    ]
    found: dict[str, Any] = {"machine": machine(), "threads": args.threads, "sentences": len(texts)}
    found |= {"tokens": sum(map(len, texts)), "passes": len(passes), "sentences_per_second": rates}
    found["ratio"] = rates["ours_together"] / rates["transformers_one_by_one"]
    found["largest_difference"] = max(differences)
    print(json.dumps(found, indent=1))


def _theirs(source: Path, task: str) -> Any:
    """Return transformers' model in fp32, eager."""
    import transformers

    maker = getattr(transformers, CLASSES[task])
    return maker.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def _rows(model: Any, text: Sequence[int]) -> Any:
    return _output(model(input_ids=torch.tensor([list(text)])))[0].numpy()


@torch.inference_mode()
def _batch(model: Any, texts: Sequence[Sequence[int]]) -> Any:
    """Return all texts at once, filled up to the longest."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(list(text)), 1
    return _output(model(input_ids=ids, attention_mask=mask))


def _output(result: Any) -> Any:
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


if __name__ == "__main__":
    main()
