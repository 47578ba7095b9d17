"""reference: what transformers makes of the parity text with the original weights in fp32, at every layer's edge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import CheckpointError, ConfigError
from shardmill.steps import ingredients, source_folder
from shardmill.store import Action, Store


def run(
    summary: Path, record: Path, text: Path, states: Path, receipt: Path, store: str, parity: Mapping[str, Any]
) -> None:
    """Args: summary plan.json; record source.receipt.json; states the result, a safetensors file with

    tokens [n], hidden [layers + 1, positions, d] and logits [n, vocab], where n covers the perplexity positions.
    """
    plan = json.loads(summary.read_text())

    def work(made: Mapping[str, Path]) -> None:
        import torch
        from safetensors.torch import save_file

        from shardmill.gates import reference

        source = source_folder(record)
        count = min(max(parity["positions"], parity["perplexity_positions"]), plan["context"])
        tokens = encode(source, text)[:count]
        if len(tokens) < parity["positions"]:
            raise ConfigError(f"{text}: {len(tokens)} tokens, parity.positions asks for {parity['positions']}")
        weights = reference.checkpoint_weights(source)
        table = weights("model.embed_tokens.weight")
        head = table if plan["architecture"]["tied"] else weights("lm_head.weight")
        trace = reference.run(reference.Reference(source, plan["context"]), tokens, table, head, weights)
        hidden = trace["hidden"][:, : parity["positions"]].contiguous()
        save_file({"tokens": torch.tensor(tokens), "hidden": hidden, "logits": trace["logits"]}, made["states"])

    Store(Path(store)).perform(action(plan, text, parity), {"states": states}, receipt, work)


def action(plan: Mapping[str, Any], text: Path, parity: Mapping[str, Any]) -> Action:
    """Args: plan plan.json's content; parity the config's."""
    inputs = {"source": plan["source"], "text": hashlib.sha256(text.read_bytes()).hexdigest()}
    params = {"context": plan["context"], **{k: parity[k] for k in ("positions", "perplexity_positions")}}
    return Action("reference", inputs, params, **ingredients("reference"))


def encode(source: Path, text: Path) -> list[int]:
    """The text's tokens by the checkpoint's own tokenizer. Raises CheckpointError where it has none."""
    from tokenizers import Tokenizer

    if not (source / "tokenizer.json").is_file():
        raise CheckpointError(f"{source}: holds no tokenizer.json; add the one that belongs to the checkpoint")
    ids: list[int] = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text.read_text(encoding="utf-8")).ids
    return ids
