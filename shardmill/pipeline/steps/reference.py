"""reference: what transformers makes of the parity text with the original weights in fp32, at every layer's edge."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.checkpoint.headers import read_header
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import CheckpointError, ConfigError
from shardmill.files import read_json
from shardmill.models import ENCODER
from shardmill.pipeline.task import Action, Task, Tools, source_folder
from shardmill.plan import Part

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 22  # bytes that are hashed at a time


def task(summary: Path, record: Path, text: Path, parity: Mapping[str, Any], tools: Tools) -> Task:
    """Describe a safetensors file of tokens [n], hidden [layers + 1, positions, d], logits [n, vocab], and experts.

    The last are there for a model that has them: indices of those that each token takes, [layers, positions, chosen].

    Of an encoder: of tokens [n] and, for each bucket T, output_T: what comes out for their passages, a row for each
    token or, where texts are classified, for each passage.

    Args:
        summary: plan.json.
        record: source.receipt.json, beside which the checkpoint lies.
        text: the parity text; its first n tokens cover the perplexity positions.
        parity: the config's.
        tools: what decides the result besides.
    """
    plan = read_json(summary)

    def work(made: Mapping[str, Path]) -> None:
        import torch
        from safetensors.torch import save_file

        from shardmill.gates import reference

        source = source_folder(record)
        count = positions(parity, plan["context"])
        tokens = encode(source, text)[:count]
        if len(tokens) < min(parity["positions"], count):
            raise ConfigError(f"{text}: {len(tokens)} tokens, parity.positions asks for {parity['positions']}")
        weights = reference.checkpoint_weights(source, plan["prefix"])
        if plan["buckets"]:
            save_file({"tokens": torch.tensor(tokens), **_outputs(source, plan, tokens, weights)}, made["states"])
            return
        table_name = "model.embed_tokens.weight"
        table = weights(table_name)
        blocks = reference.mapped_rows(weights, table_name if plan["architecture"]["tied"] else "lm_head.weight")
        model = reference.Reference(source, plan["context"], reference.carried_channels(plan))
        trace = model.run(tokens, lambda ids: table[ids], blocks, weights)
        trace["tokens"] = torch.tensor(tokens)
        for name in trace.keys() & {"hidden", "experts"}:
            trace[name] = trace[name][:, : parity["positions"]].contiguous()
        save_file(trace, made["states"])

    inputs = {"source": plan["source"], "text": hashlib.sha256(text.read_bytes()).hexdigest()}
    params = {"context": plan["context"], **{k: parity[k] for k in ("positions", "perplexity_positions")}}
    return Task(work, Action("reference", inputs, params, **tools))


def positions(parity: Mapping[str, Any], context: int) -> int:
    """Return how many of the text's tokens are fed at most, and so how many rows of logits there are."""
    return min(max(int(parity["positions"]), int(parity["perplexity_positions"])), context)


def seen(states: Path, part: Part) -> str:
    """Return content hash of what a part is compared with.

    The hidden states at its own edges; the last and logits for a head.

    The edges of experts are those of their layer.

    So what changes in one layer leaves the parts before it alone.

    Args:
        states: what this step wrote, or a link to it.
        part: the part.
    """
    states = states.resolve()
    held = {tensor.name: tensor for tensor in read_header(states.parent, states.name)}
    if part.kind == ENCODER:
        output, tokens = held[f"output_{part.tokens}"], held["tokens"]
        return _hashed(states, [(tokens.start, tokens.end), (output.start, output.end)], repr(output.shape))
    hidden, logits = held["hidden"], held["logits"]
    edge = (hidden.end - hidden.start) // hidden.shape[0]  # bytes
    end = hidden.shape[0] - 1
    edges = {"layers": (part.start, part.end), "experts": (part.layer, part.layer + 1)}
    first, last = edges.get(part.kind, (end, end))
    spans = [(hidden.start + first * edge, hidden.start + (last + 1) * edge)]
    spans += [] if part.kind in edges else [(logits.start, logits.end)]
    if "experts" in held and part.kind == "layers":
        row = (held["experts"].end - held["experts"].start) // held["experts"].shape[0]
        spans.append((held["experts"].start + first * row, held["experts"].start + last * row))
    return _hashed(states, spans, repr((hidden.shape[1:], logits.shape)))


def _outputs(
    source: Path, plan: Mapping[str, Any], tokens: list[int], weights: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Return what transformers makes of the tokens' passages, for each bucket."""
    import torch

    from shardmill.gates.encoder_reference import EncoderReference, passages

    model, table = EncoderReference(source, plan["task"]), weights(plan["tables"]["embedding"])
    found = {}
    for bucket in plan["buckets"]:
        outputs = model.run(passages(tokens, bucket, plan["task"]), lambda ids: table[ids], weights)
        found[f"output_{bucket}"] = torch.cat(outputs).contiguous()
    return found


def _hashed(states: Path, spans: list[tuple[int, int]], shapes: str) -> str:
    """Return sha256 of what some ranges of bytes of a file hold, and of the shapes that they have."""
    digest = hashlib.sha256(shapes.encode())
    with states.open("rb") as stream:
        for start, end in spans:
            stream.seek(start)
            for at in range(start, end, BLOCK):
                digest.update(stream.read(min(BLOCK, end - at)))
    return digest.hexdigest()


def encode(source: Path, text: Path) -> list[int]:
    """Return the text's tokens by the checkpoint's own tokenizer. Raises CheckpointError where it has no sound one."""
    file = source / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{source}: holds no tokenizer.json; add the one that belongs to the checkpoint")
    tokenizer = read_tokenizer(file)
    try:
        ids: list[int] = tokenizer.encode(text.read_text(encoding="utf-8")).ids
    except UnicodeDecodeError as error:
        raise ConfigError(f"{text}: not UTF-8 text") from error
    return ids
