"""Fits an EAGLE-3 head to a model: the head learns the model's distribution of the tokens that a draft would hold.

The loss is the cross-entropy with the model's own distribution, summed over the steps of a draft. A draft goes on only
while it is right, so later steps count as often as decoding would reach them. Each step of training draws its windows
by its own number, and what a run has reached is written now and then. So a run that was interrupted ends with the
weights, to the last bit, of one that was not, if it computes with as many threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from shardmill.errors import ShardmillError
from shardmill.files import replacing, write_json
from shardmill.models.eagle3 import EAGLE3, LAYER_IDS, TAPS, default_taps
from shardmill.models.eagle3_head import Eagle3Head
from shardmill.printable import first_line
from shardmill_lab.draft import windows
from shardmill_lab.draft.measure import measure_acceptance
from shardmill_lab.draft.states import (
    Windows,
    continued,
    embedding_table,
    kept_windows,
    load_reference,
    multiplies_bf16,
    multiply_in_bf16,
)
from shardmill_lab.draft.unrolled import Rows, asked_rows, right_drafts, rows_of, unrolled

THREADS = 2  # sums depend on it, so it is no setting of the machine
BATCH = 8  # windows of a step
UNROLLED = 5  # steps of a draft
RATE = 6e-3 * 96  # over the head's width; 6e-3 was the best for a head that is 96 wide (lab/benchmarks.md)
WARM = 0.05  # share of the steps in which the rate rises
SAVED = 25  # steps between two files of progress
MOST_ROWS = 32000  # tokens that a head drafts, as published heads have them
REPORT = "training.json"
LEAST_LAYERS = 6  # of a model whose usual taps are not all one layer


@dataclass(frozen=True)
class Run:
    """Where a run keeps its progress, and how long it is.

    Attributes:
        folder: the folder of its progress, for this run only.
        texts: the folder of the texts that it learns from, for this model and these texts only.
        steps: steps of training.
        say: told how far it is.
    """

    folder: Path
    texts: Path
    steps: int
    say: Callable[[str], None]


def train_head(
    source: Path,
    plan: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    run: Run,
    out: Path,
) -> None:
    """Train a head for a model, measure it on held-out texts, and write both.

    Args:
        source: the model's checkpoint.
        plan: its plan.json's content.
        prompts: what the head learns from, see `continued`.
        held_out: prompts of the texts on which it is measured.
        run: where the run keeps its progress, and how long it is.
        out: the head's folder.

    Raises:
        ShardmillError: no head can be made for such a model, the texts hold nothing to draft, a gradient is not finite,
            or OpenMP has too few threads.
    """
    from shardmill.imports import quiet_transformers

    layers = plan["architecture"]["layers"]
    if layers < LEAST_LAYERS:
        raise ShardmillError(f"the model has {layers} layers; a head needs {LEAST_LAYERS} or more")
    with _threads(THREADS), quiet_transformers():
        model = load_reference(source)
        config, taps = model.config.get_text_config(), default_taps(layers)
        table, lm_head = embedding_table(model, plan), model.get_output_embeddings().weight
        texts = continued(model, held_out, taps, windows.WINDOW)
        multiply_in_bf16(model)
        seen = kept_windows(run.texts, model, prompts, taps, run.say)
        ids = frequent_tokens(seen.tokens[seen.own], config.vocab_size)
        head = new_head(head_config(config, len(ids)), lm_head[ids], seen)
        reached = measure_acceptance(trained(head, seen, table, lm_head[ids], ids, run).eval(), texts, table, ids)
    write_head(out, head, ids, config.vocab_size)
    write_json(out / REPORT, {"steps": run.steps, "text_tokens": int(seen.own.sum()), "held_out": reached.plain()})


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with as many threads in this context.

    Raises ShardmillError if OpenMP may not have as many: PyTorch's products in bf16 are wrong then (docs/upstream.md).
    """
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    if limit.isdigit() and int(limit) < count:
        raise ShardmillError(f"OMP_THREAD_LIMIT is {limit}, but training computes with {count} threads; unset it")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def head_config(config: Any, rows: int) -> Any:
    """Return transformers' config of a new head for a model's config.

    Args:
        config: the model's.
        rows: tokens that the head drafts.
    """
    from transformers import LlamaConfig

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


def frequent_tokens(tokens: Tensor, vocab: int) -> Tensor:
    """Return the tokens that a head drafts, ascending: all, or the most frequent of a text in a large vocabulary."""
    if vocab <= MOST_ROWS:
        return torch.arange(vocab)
    counts = torch.bincount(tokens.flatten(), minlength=vocab)
    return counts.sort(descending=True, stable=True).indices[:MOST_ROWS].sort().values


def new_head(config: Any, lm_head: Tensor, seen: Windows) -> Eagle3Head:
    """Return a head to be trained: it begins with the model's LM head and the last of its taps.

    Its last norm gives every channel the size that the channel has before the model's LM head.
    """
    torch.manual_seed(0)
    head, width = Eagle3Head(config), config.hidden_size
    tap, last = seen.taps[::8, :, (TAPS - 1) * width :][seen.own[::8]].float(), seen.last[::8][seen.own[::8]].float()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 / parameter.shape[1] ** 0.5)
        head.fc.weight.zero_()
        head.fc.weight[:, (TAPS - 1) * width :] = torch.eye(width)
        head.lm_head.weight.copy_(lm_head)
        head.norm.weight.copy_(_size(last) / _size(head.norm(tap)))
    return head


def _size(x: Tensor) -> Tensor:
    """Return the root of the mean square of each channel: [d] of [n, d]."""
    return x.square().mean(0).sqrt()


def trained(head: Eagle3Head, seen: Windows, table: Tensor, lm_head: Tensor, ids: Tensor, run: Run) -> Eagle3Head:
    """Return the head after training on windows.

    Args:
        head: a new head.
        seen: the windows to learn.
        table: the embedding of each token, as the model's first layer reads it, [vocab, d].
        lm_head: the rows of the model's LM head that the head drafts, [rows, d].
        ids: the tokens of these rows.
        run: what to do.

    Raises:
        ShardmillError: the texts hold nothing to draft, or a gradient is not finite.
    """
    usable = asked_rows(seen.own).any(1).nonzero()[:, 0]
    if not len(usable):
        raise ShardmillError("the model answers every prompt with a single token, so there is nothing to draft")
    rate = RATE / head.config.hidden_size
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    file = run.folder / "progress.safetensors"
    for step in range(_resumed(file, head, optimizer), run.steps):
        chosen = usable[torch.randint(len(usable), (BATCH,), generator=torch.Generator().manual_seed(step))]
        loss = _loss(head, seen, chosen, table, lm_head, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        if not torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0).isfinite():
            why = f"step {step + 1}: the gradient is not finite, so the run keeps what it had saved before"
            raise ShardmillError(f"{why}; train on another text")
        for group in optimizer.param_groups:
            group["lr"] = rate * _share(step, run.steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVED == 0 or step + 1 == run.steps:
            _save(file, head, optimizer, step + 1)
            run.say(f"step {step + 1} of {run.steps}, {(step + 1) * BATCH} texts: loss {loss.item():.3f}")
    return head


def _loss(head: Eagle3Head, seen: Windows, chosen: Tensor, table: Tensor, lm_head: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of some windows, in nats of a position at which a draft begins."""
    tokens, written = seen.tokens[chosen], seen.own[chosen]
    taps, last = seen.taps[chosen].float(), seen.last[chosen].float()
    asked, compare, losses = asked_rows(written), right_drafts(tokens, written, ids), list[Tensor]()

    def goes_on(step: int, rows: Rows) -> Tensor:
        at = (rows.places + step + 1).clamp(max=tokens.shape[1] - 1)
        truth = linear(rows_of(last, at), lm_head).float().softmax(-1)
        losses.append(-((truth * rows.logits.float().log_softmax(-1)).sum(-1) * rows.real).sum())
        return compare(step, rows)[1]

    with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bf16()):
        for _ in unrolled(head, table[tokens], taps, asked, UNROLLED, goes_on):
            pass
    return torch.stack(losses).sum() / asked.sum()


def _share(step: int, steps: int) -> float:
    """Return the share of the rate at a step: it rises, and then falls like a cosine."""
    rising = (step + 1) / max(1, WARM * steps)
    return min(rising, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def _save(file: Path, head: Eagle3Head, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Write what a run has reached; the file appears whole or not at all."""
    tensors = {f"head.{name}": value for name, value in head.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": value for name, value in state.items()}
    with replacing(file) as fresh:
        save_file(tensors | {"done": torch.tensor(done)}, fresh)


def _resumed(file: Path, head: Eagle3Head, optimizer: torch.optim.Optimizer) -> int:
    """Restore what a run has reached and return the steps that are done; 0 without a file.

    Raises ShardmillError for a file that can't be read.
    """
    if not file.is_file():
        return 0
    try:
        tensors = load_file(file)
        done = int(tensors.pop("done"))
        head.load_state_dict({n.removeprefix("head."): v for n, v in tensors.items() if n.startswith("head.")})
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, number, key = name.split(".")
                states.setdefault(int(number), {})[key] = value
        groups: Sequence[Any] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": states, "param_groups": groups})
    except Exception as error:  # whatever safetensors and torch raise
        raise ShardmillError(f"{file} can't be read ({first_line(error)}); remove it and train again") from error
    return done


def write_head(folder: Path, head: Eagle3Head, rows: Tensor, vocab: int) -> None:
    """Write a head in the published layout: config.json, and its weights with the tokens of its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.half().contiguous() for name, value in head.state_dict().items()}
    if len(rows) < vocab:
        tensors |= {"d2t": rows - torch.arange(len(rows)), "t2d": torch.isin(torch.arange(vocab), rows)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "drafter": EAGLE3})
    head.config.save_pretrained(folder)


def head_tokens(folder: Path) -> Tensor:
    """Return the token of each row of a written head's LM head."""
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(len(tensors["lm_head.weight"]))
    return ids + tensors["d2t"] if "d2t" in tensors else ids
