"""Fits an EAGLE-3 head to a model: the head learns the model's distribution of the tokens that a draft would hold.

The loss is the cross-entropy with the model's own distribution, summed over the steps of a draft with falling weights.
Each step draws its windows by its own number, and what a run has reached is written now and then. So a run that was
interrupted ends with the weights, to the last bit, of one that was not, if it computes with as many threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from shardmill.draft.states import WINDOW, Windows
from shardmill.draft.unrolled import unrolled
from shardmill.errors import ShardmillError
from shardmill.files import replacing
from shardmill.gates.eagle3 import ReferenceHead
from shardmill.models.eagle3 import EAGLE3, LAYER_IDS, TAPS, default_taps
from shardmill.printable import first_line

THREADS = 2  # sums depend on it, so it is no setting of the machine
BATCH = 8  # windows of a step
UNROLLED = 5  # steps of a draft
FADING = 0.8  # weight of a step, relative to the step before it
RATE = 2e-3  # of a head that is NARROW wide; a wider one learns at a rate that falls as the root of its width
NARROW = 96
WARM = 0.05  # share of the steps in which the rate rises
SAVED = 25  # steps between two files of progress
MOST_ROWS = 32000  # tokens that a head drafts, as published heads have them
LEAST_LAYERS = 6  # of a model whose usual taps are three different layers in order


@dataclass(frozen=True)
class Run:
    """Where a run keeps its progress, and how long it is.

    Attributes:
        folder: the folder of its files, for this run only.
        steps: steps of training.
        say: told how far it is.
    """

    folder: Path
    steps: int
    say: Callable[[str], None]


def head_config(config: Any, rows: int) -> Any:
    """Return transformers' config of a new head for a model's config.

    Args:
        config: the model's.
        rows: tokens that the head drafts.

    Raises:
        ShardmillError: no head can be made for such a model.
    """
    from transformers import LlamaConfig

    if config.num_hidden_layers < LEAST_LAYERS:
        raise ShardmillError(f"the model has {config.num_hidden_layers} layers; a head needs {LEAST_LAYERS} or more")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    taps = default_taps(config.num_hidden_layers)
    made = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        vocab_size=config.vocab_size,
        tie_word_embeddings=False,
    )
    layers = {LAYER_IDS: [tap - 1 for tap in taps], "use_aux_hidden_state": True}
    made.update({"draft_vocab_size": rows, "eagle_config": layers})
    return made


def drafted_rows(tokens: Tensor, vocab: int) -> Tensor:
    """Return the tokens that a head drafts, ascending: all, or the most frequent of a text in a large vocabulary."""
    if vocab <= MOST_ROWS:
        return torch.arange(vocab)
    counts = torch.bincount(tokens.flatten(), minlength=vocab)
    return counts.sort(descending=True, stable=True).indices[:MOST_ROWS].sort().values


def new_head(config: Any, lm_head: Tensor) -> ReferenceHead:
    """Return a head to be trained: it begins with the model's LM head and the last of its taps."""
    torch.manual_seed(0)
    head, width = ReferenceHead(config), config.hidden_size
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 / parameter.shape[1] ** 0.5)
        head.fc.weight.zero_()
        head.fc.weight[:, (TAPS - 1) * width :] = torch.eye(width)
        head.lm_head.weight.copy_(lm_head)
    return head


def trained(head: ReferenceHead, seen: Windows, table: Tensor, lm_head: Tensor, run: Run) -> ReferenceHead:
    """Return the head after training on windows.

    Args:
        head: a new head.
        seen: the windows to learn.
        table: the embedding of each token, as the model's first layer reads it, [vocab, d].
        lm_head: the rows of the model's LM head that the head drafts, [rows, d].
        run: what to do.
    """
    with _threads(THREADS):
        return _trained(head, seen, table, lm_head, run)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with as many threads in this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _trained(head: ReferenceHead, seen: Windows, table: Tensor, lm_head: Tensor, run: Run) -> ReferenceHead:
    """Do the same as `trained`, with the threads that are set."""
    rate = RATE * (NARROW / head.config.hidden_size) ** 0.5
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    file = run.folder / "progress.safetensors"
    for step in range(_resumed(file, head, optimizer), run.steps):
        chosen = torch.randint(len(seen.tokens), (BATCH,), generator=torch.Generator().manual_seed(step))
        loss = _loss(head, seen, chosen, table, lm_head)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * _share(step, run.steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVED == 0 or step + 1 == run.steps:
            _save(file, head, optimizer, step + 1)
            run.say(f"step {step + 1} of {run.steps}, {(step + 1) * BATCH * WINDOW} tokens: loss {loss.item():.3f}")
    return head


def _loss(head: ReferenceHead, seen: Windows, chosen: Tensor, table: Tensor, lm_head: Tensor) -> Tensor:
    """Return the loss of some windows, in nats of a token."""
    tokens, taps, last = seen.tokens[chosen], seen.taps[chosen].float(), seen.last[chosen].float()
    truth = linear(last, lm_head).softmax(-1)  # [texts, n, rows]
    losses = [
        -(truth[:, 1 + step : 1 + step + logits.shape[1]] * logits.log_softmax(-1)).sum(-1).mean()
        for step, logits in enumerate(unrolled(head, table[tokens], taps, UNROLLED))
    ]
    weights = [FADING**step for step in range(UNROLLED)]
    total: Tensor = sum((weight * loss for weight, loss in zip(weights, losses, strict=True)), torch.zeros(()))
    return total / sum(weights)


def _share(step: int, steps: int) -> float:
    """Return the share of the rate at a step: it rises, and then falls like a cosine."""
    rising = (step + 1) / max(1, WARM * steps)
    return min(rising, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def _save(file: Path, head: ReferenceHead, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Write what a run has reached; the file appears whole or not at all."""
    held = {f"head.{name}": value for name, value in head.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        held |= {f"adam.{number}.{name}": value for name, value in state.items()}
    with replacing(file) as fresh:
        save_file(held | {"done": torch.tensor(done)}, fresh)


def _resumed(file: Path, head: ReferenceHead, optimizer: torch.optim.Optimizer) -> int:
    """Restore what a run has reached and return the steps that are done; 0 without a file.

    Raises ShardmillError for a file that can't be read.
    """
    if not file.is_file():
        return 0
    try:
        held = load_file(file)
        done = int(held.pop("done"))
        head.load_state_dict({n.removeprefix("head."): v for n, v in held.items() if n.startswith("head.")})
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in held.items():
            if name.startswith("adam."):
                _, number, key = name.split(".")
                states.setdefault(int(number), {})[key] = value
        groups: Sequence[Any] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": states, "param_groups": groups})
    except Exception as error:  # whatever safetensors and torch raise
        raise ShardmillError(f"{file} can't be read ({first_line(error)}); remove it and train again") from error
    return done


def write_head(folder: Path, head: ReferenceHead, rows: Tensor, vocab: int) -> None:
    """Write a head in the published layout: config.json, and its weights with the tokens of its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.half().contiguous() for name, value in head.state_dict().items()}
    if len(rows) < vocab:
        tensors |= {"d2t": rows - torch.arange(len(rows)), "t2d": torch.isin(torch.arange(vocab), rows)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "drafter": EAGLE3})
    head.config.save_pretrained(folder)
