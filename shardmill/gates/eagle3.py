"""The reference of an EAGLE-3 head, and the cases of its parts; models/eagle3_head.py has its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardmill.checkpoint.headers import read_tensors
from shardmill.convert.weights import read_info
from shardmill.gates.case import Case, compared
from shardmill.gates.reference import ReferenceDrafter, Steps
from shardmill.gates.stored import StoredWeights
from shardmill.models.eagle3 import EAGLE3, FOLDER, TOKENS, load_head_config
from shardmill.models.eagle3_head import Eagle3Head
from shardmill.plan import Part


def load_head(folder: Path) -> Eagle3Head:
    """Return the head of a checkpoint, in fp32."""
    head, tensors = Eagle3Head(load_head_config(folder)).eval(), read_tensors(folder)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(read_info(tensors[name.replace("midlayer.", prefix)], folder).float())
    return head.requires_grad_(False)


def head_case(
    part: Part, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    """Return the case of a part of a head: the text's pairs of a hidden state and the token after it.

    Args:
        part: the part.
        plan: plan.json's content.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d or more].
        source: the model's checkpoint, with the head's in a folder inside it.
        stored: the package's weights.
    """
    (exact, packaged), width = (load_head(source / FOLDER) for _ in range(2)), part.spec.graph.hidden
    hidden = known["hidden"][:, :, :width]
    _hold(packaged, stored)
    with torch.no_grad():
        tapped = torch.cat([hidden[layer] for layer in plan["drafter"]["taps"]], dim=-1)
        embedded, read = hidden[0, 1:], exact.fuse(tapped)[:-1]
        last = exact(embedded, read)
    x = torch.cat([embedded, read], dim=-1)
    cases: dict[str, tuple[dict[str, Tensor], Callable[[Eagle3Head, Mapping[str, Tensor]], Tensor]]] = {
        "fuse": ({"x": tapped}, lambda head, rows: head.fuse(rows["x"])),
        "layers": ({"x": x}, lambda head, rows: head(*rows["x"].chunk(2, dim=-1))),
        "head": ({"hidden": last}, lambda head, rows: head.logits(rows["hidden"])),
    }
    return compared(*cases[part.kind], packaged, exact)


def reference_head(
    plan: Mapping[str, Any], source: Path, all_stored: Iterable[StoredWeights], embed: Callable[[Sequence[int]], Tensor]
) -> ReferenceDrafter:
    """Return a head that drafts; it knows the checkpoint's own tokens of its rows.

    Args:
        plan: plan.json's content.
        source: the model's checkpoint, with the head's in a folder inside it.
        all_stored: the weights of the head's packages.
        embed: returns the model's embeddings of tokens, [n, d].
    """
    head, known = load_head(source / FOLDER), read_tensors(source / FOLDER)
    for stored in all_stored:
        _hold(head, stored)
    ids = torch.arange(head.lm_head.out_features)
    if TOKENS in known:
        with safe_open(source / FOLDER / known[TOKENS].file, "pt") as file:
            ids = ids + file.get_tensor(TOKENS)

    def begin(hidden: Tensor) -> Callable[[Sequence[int]], Steps]:
        width = head.config.hidden_size
        fused = head.fuse(torch.cat([hidden[layer, :, :width] for layer in plan["drafter"]["taps"]], dim=-1))

        def steps(context: Sequence[int]) -> Steps:
            tokens, read = list(context[1:]), fused[: len(context) - 1]
            while True:
                last = head(embed(tokens), read)[-1:]
                tokens.append((yield head.logits(last)[0]))
                read = torch.cat([read, last])

        return steps

    return ReferenceDrafter(EAGLE3, ids.tolist(), [head], begin)


@torch.no_grad()
def _hold(head: Eagle3Head, stored: StoredWeights) -> None:
    """Give a head the weights that a package contains."""
    parameters = dict(head.named_parameters())
    for name in {tensor.source.tensor for tensor in stored.part.tensors}:
        parameters[name.removeprefix(FOLDER).replace("layers.0.", "midlayer.")].copy_(stored(name))
