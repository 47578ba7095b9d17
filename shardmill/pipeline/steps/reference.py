"""reference: outputs of transformers for the parity text, original weights in fp32, at every layer's edge."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.checkpoint.headers import read_header
from shardmill.checkpoint.tokenizer import (
    ODD_TEXTS,
    TOKENIZER,
    difference,
    every_added_token,
    read_tokenizer,
    transformers_tokenizer,
)
from shardmill.errors import CheckpointError, ConfigError
from shardmill.files import read_json
from shardmill.gates.passes import LONG, STRETCH, sampled
from shardmill.pipeline.task import Action, Task, Tools, source_folder
from shardmill.plan import Part

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 22  # bytes that are hashed at a time


def task(summary: Path, record: Path, text: Path, parity: Mapping[str, Any], tools: Tools) -> Task:
    """Describe a safetensors file: tokens [n], hidden [layers + 1, positions, d], logits [n, vocab], experts, rows.

    The tokens cover the perplexity positions. `experts` exists only for a model with experts: the indices of each
    token's experts, [layers, positions, chosen]. `rows` exists only for a model with a second table of tokens: what the
    table gives for them, [positions, layers * width].

    `long_tokens` [m] and `long_logits` [s, vocab] exist only for a model with a recurrence: a longer text, and its
    logits at the positions `sampled(m)`. The logits at all positions might take gigabytes.

    An encoder's file has tokens [n] and, for each bucket T, output_T: the outputs for the passages of the tokens. Each
    token has a row; if texts are classified, each passage has a row. For each layer L but the first with which a part
    begins, hidden_T_L has this layer's inputs, [n, d].
    """
    plan = read_json(summary)
    cuts = sorted({row["start"] for row in plan.get("parts", ()) if row["kind"] == "encoder"} - {0})

    def work(made: Mapping[str, Path]) -> None:
        import torch
        from safetensors.torch import save_file

        from shardmill.gates import reference

        source = source_folder(record)
        count = positions(parity, plan["context"])
        whole = encode(source, text)[: plan["context"]]
        _check_tokens(source, text)
        tokens = whole[:count]
        if len(tokens) < min(parity["positions"], count):
            raise ConfigError(f"{text}: {len(tokens)} tokens, parity.positions asks for {parity['positions']}")
        weights = reference.checkpoint_weights(source, plan["prefix"])
        if plan["buckets"]:
            save_file({"tokens": torch.tensor(tokens), **_outputs(source, plan, tokens, weights, cuts)}, made["states"])
            return
        model = reference.Reference(source, plan["context"], reference.carried_channels(plan))
        table_name = f"model.{model.tables[0]}.weight"
        table = weights(table_name)
        head = table_name if plan["architecture"]["tied"] else "lm_head.weight"
        second = weights(f"model.{model.second}.weight") if model.second else None
        rows = None if second is None else (lambda ids: second[ids])
        trace = model.run(tokens, lambda ids: table[ids], reference.mapped_rows(weights, head), weights, rows)
        trace["tokens"] = torch.tensor(tokens)
        for name in trace.keys() & {"hidden", "experts"}:
            trace[name] = trace[name][:, : parity["positions"]].contiguous()
        if "rows" in trace:
            trace["rows"] = trace["rows"][: parity["positions"]].contiguous()
        if "recurrent" in plan and len(whole) > STRETCH:
            longer = whole[:LONG]
            hidden = model.first(longer, lambda ids: table[ids], weights)
            for index in range(plan["architecture"]["layers"]):  # one by one: a call returns what every layer gives
                hidden = model.layers(hidden, [index], weights)[-1]
            chosen = hidden[sampled(len(longer))]
            trace["long_logits"] = model.logits(chosen, reference.mapped_rows(weights, head), weights)
            trace["long_tokens"] = torch.tensor(longer)
        save_file(trace, made["states"])

    inputs = {"source": plan["source"], "text": hashlib.sha256(text.read_bytes()).hexdigest()}
    params = {"context": plan["context"], **{k: parity[k] for k in ("positions", "perplexity_positions")}}
    params |= {key: plan[key] for key in ("task", "buckets", "head", "answers") if plan["buckets"] and key in plan}
    params |= {"cuts": cuts} if cuts else {}
    return Task(work, Action("reference", inputs, params, **tools))


def positions(parity: Mapping[str, Any], context: int) -> int:
    """Return the largest number of tokens from the text, which is also the number of rows of logits."""
    return min(max(int(parity["positions"]), int(parity["perplexity_positions"])), context)


def seen(states: Path, part: Part) -> str:
    """Return the content hash of a part's reference values.

    The values are the hidden states at the part's edges, and at the edges of layers whose caches it reads; for a head,
    the last hidden state and the logits; for a part of a drafter, all hidden states. The edges of experts are the edges
    of their layer. So a change in one layer does not affect the parts before that layer.

    Args:
        states: the output of this step, or a link to that file.
        part: the part.
    """
    states = states.resolve()
    tensors = {tensor.name: tensor for tensor in read_header(states.parent, states.name)}
    if part.spec.encodes:
        edges = [tensors[name] for name in map(part.edge, (part.start, part.end)) if name in tensors]
        output, tokens = tensors[f"output_{part.spec.tokens}"], tensors["tokens"]
        ends = [output] if part.edge(part.end) not in tensors else []
        values = [tokens, *ends, *edges]
        return _hashed(states, [(each.start, each.end) for each in values], repr(output.shape))
    hidden, logits = tensors["hidden"], tensors["logits"]
    if part.drafter:
        return _hashed(states, [(hidden.start, hidden.end)], repr(hidden.shape))
    edge = (hidden.end - hidden.start) // hidden.shape[0]  # bytes
    end = hidden.shape[0] - 1
    first, last = part.edges(end)
    spans = [(hidden.start + first * edge, hidden.start + (last + 1) * edge)]
    spans += [(hidden.start + i * edge, hidden.start + (i + 2) * edge) for i, _ in part.spec.lent]
    spans += [(logits.start, logits.end)] if first == end else []
    if "experts" in tensors and part.spec.layers:
        row = (tensors["experts"].end - tensors["experts"].start) // tensors["experts"].shape[0]
        spans.append((tensors["experts"].start + first * row, tensors["experts"].start + last * row))
    if "rows" in tensors and part.spec.layers:  # and the first layer's input, which every part takes, too
        spans += [(hidden.start, hidden.start + edge), (tensors["rows"].start, tensors["rows"].end)]
    return _hashed(states, spans, repr((hidden.shape[1:], logits.shape)))


def _outputs(
    source: Path, plan: Mapping[str, Any], tokens: list[int], weights: Callable[[str], Tensor], cuts: Sequence[int]
) -> dict[str, Tensor]:
    """Return the outputs of transformers for the tokens' passages, for each bucket, and the inputs of some layers."""
    from shardmill.gates.encoder_reference import EncoderReference, answer_rows, passages

    model = EncoderReference(source, plan["task"])
    tensors, head = {}, answer_rows(plan, weights)
    for bucket in plan["buckets"]:
        texts = passages(tokens, bucket, plan["task"])
        seen, outputs = model.traced(cuts, texts, weights, plan["tables"]["embedding"], head)
        tensors[f"output_{bucket}"] = outputs.contiguous()
        tensors |= {f"hidden_{bucket}_{layer}": rows.contiguous() for layer, rows in seen.items()}
    return tensors


def _hashed(states: Path, spans: list[tuple[int, int]], shapes: str) -> str:
    """Return the sha256 over some byte ranges of a file and over the shapes of their tensors."""
    digest = hashlib.sha256(shapes.encode())
    with states.open("rb") as stream:
        for start, end in spans:
            stream.seek(start)
            for at in range(start, end, BLOCK):
                digest.update(stream.read(min(BLOCK, end - at)))
    return digest.hexdigest()


def _check_tokens(source: Path, text: Path) -> None:
    """Check that tokenizer.json and transformers make the same tokens of a text, of odd texts and of all added tokens.

    Every gate feeds both models the same tokens, so no gate would notice that transformers has others.

    Raises:
        CheckpointError: they differ, or transformers can't load the tokenizer.
    """
    file, theirs = source / TOKENIZER, transformers_tokenizer(source)
    texts = [text.read_text(encoding="utf-8"), every_added_token(theirs), *ODD_TEXTS]
    if problem := difference(file, read_tokenizer(file), theirs, texts):
        raise CheckpointError(problem)


def encode(source: Path, text: Path) -> list[int]:
    """Return the text's tokens by the checkpoint's tokenizer. Raises CheckpointError if that is missing or damaged."""
    file = source / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{source}: holds no tokenizer.json; add the one that belongs to the checkpoint")
    tokenizer = read_tokenizer(file)
    try:
        ids: list[int] = tokenizer.encode(text.read_text(encoding="utf-8")).ids
    except UnicodeDecodeError as error:
        raise ConfigError(f"{text}: not UTF-8 text") from error
    return ids
