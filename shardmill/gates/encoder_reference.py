"""Transformers' encoders as references: outputs for texts, with weights that are read layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.gates.naming import Weights, loaded, loading
from shardmill.gates.reference import checkpoint_origins, empty_model, return_heap
from shardmill.gates.replacements import Blocks, Skipped, embedded_rows
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL, RANK
from shardmill.models.hf_config import load_hf_config

CLASSES = {
    LABEL: "AutoModelForTokenClassification",
    CLASSIFY: "AutoModelForSequenceClassification",
    EMBED: "AutoModel",
    RANK: "AutoModelForCausalLM",
}
BATCH = 256  # tokens that go through a layer at once: more would cost memory and save little time
SHORT = 16  # tokens of a text that is classified as a whole, so that the reference has several such texts


class EncoderReference:
    """Transformers' encoder for a checkpoint's config, without weights."""

    def __init__(self, source: Path, task: str) -> None:
        """Build the model on the meta device.

        Args:
            source: the folder with config.json.
            task: the model's task, which decides its head.
        """
        self.model = empty_model(source, _class(source, task))
        if getattr(self.model, "pooler", None) is not None:
            self.model.pooler = None  # an embedding is computed from hidden states
        # Under a head, a language model's tensors begin with "model."; here they do even if transformers has no head.
        self.named = nn.ModuleDict({"model": self.model}) if hasattr(self.model, "embed_tokens") else self.model
        self.origins = checkpoint_origins(self.model, source)
        self.path, self.layers = _layers(self.named, self.model.config.num_hidden_layers)

    @torch.no_grad()
    def run(
        self, texts: Sequence[Sequence[int]], weights: Weights, table: str, head: Tensor | None = None
    ) -> list[Tensor]:
        """Return the output for each text: a row [n, labels or d] for each token, or [1, labels] for the whole text.

        A layer's weights are read again for each batch of texts.

        Args:
            texts: the tokens of each text.
            weights: the weights by transformers' names.
            table: the embedding table's name.
            head: of a model that ranks, the rows of the LM head for the answers, [answers, d].
        """
        if hasattr(self.model, "lm_head"):  # in place of the whole head, whose logits nobody reads
            self.model.lm_head = nn.Identity() if head is None else Blocks([head], None, None)
        embed, tokens = self.model.get_input_embeddings(), torch.cat([torch.tensor(list(text)) for text in texts])
        layers = {f"{self.path}.{index}.": layer for index, layer in enumerate(self.layers)}
        with (
            embedded_rows(embed, tokens, lambda ids: weights(table)[ids]) as places,
            loading(layers, self.origins, weights, lambda: None),
        ):
            self._load_around(embed, weights)
            batches = _batches(torch.split(places, [len(text) for text in texts]))
            outputs = [out for batch in batches for out in self._outputs(self.model(input_ids=batch))]
        return_heap()
        return outputs

    def traced(self, layers: Collection[int], *arguments: Any) -> tuple[dict[int, Tensor], Tensor]:
        """Return the inputs [n, d] of some layers and all outputs, for all texts; `arguments` is what `run` takes."""
        rows: dict[int, list[Tensor]] = {index: [] for index in layers}

        def note(index: int) -> Callable[..., None]:
            return lambda module, args: rows[index].append(args[0].flatten(end_dim=1))

        with ExitStack() as stack:
            for index in layers:
                stack.callback(self.layers[index].register_forward_pre_hook(note(index)).remove)
            outputs = torch.cat(self.run(*arguments))
        return {index: torch.cat(batches) for index, batches in rows.items()}, outputs

    def between(self, start: int, end: int, hidden: Tensor | None, *arguments: Any) -> Tensor:
        """Return what the layers [start, end) give for all texts, [n, d], or the model's outputs after the last layer.

        Args:
            start: the first layer.
            end: the layer after the last one.
            hidden: its inputs for all texts, [n, d]; None for the tokens' embeddings.
            arguments: the arguments of `run`.
        """
        layers, left = list(self.layers), hidden

        def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal left
            assert left is not None
            count = args[0].shape[0] * args[0].shape[1]
            taken, left = left[:count], left[count:]
            return (taken.reshape(args[0].shape), *args[1:]), kwargs

        with ExitStack() as stack:
            for index, layer in enumerate(layers):
                if not start <= index < end:
                    self.layers[index] = Skipped(layer, 0)
                    stack.callback(self.layers.__setitem__, index, layer)
            if hidden is not None:
                stack.callback(layers[start].register_forward_pre_hook(feed, with_kwargs=True).remove)
            after, outputs = self.traced([end] if end < len(layers) else [], *arguments)
        return after.get(end, outputs)

    def _load_around(self, embed: nn.Module, weights: Weights) -> None:
        """Load the model's weights, but not the layers' weights and the token embedding table."""
        for name, module in self.named.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            if module is not embed and not name.startswith(f"{self.path}."):
                for key in parameters:
                    value = loaded(f"{name}.{key}" if name else key, self.origins, weights)
                    setattr(module, key, nn.Parameter(value, requires_grad=False))

    def _outputs(self, result: Any) -> Iterator[Tensor]:
        """Yield [n, labels or d] or [1, labels] for each text of a batch."""
        out: Tensor = result.logits if "logits" in result else result.last_hidden_state
        yield from (each.reshape(-1, each.shape[-1]) for each in out)


def _class(source: Path, task: str) -> str:
    """Return transformers' auto class for a checkpoint and a task.

    For embeddings, a language model keeps the names that its tensors have under an LM head.
    """
    from transformers.models.auto import modeling_auto as auto

    family = load_hf_config(source).model_type
    writes = family in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return CLASSES[RANK] if task == EMBED and writes else CLASSES[task]


def answer_rows(plan: Mapping[str, Any], weights: Weights) -> Tensor | None:
    """Return a checkpoint's rows of the LM head for the answers, [answers, d]; None if the model ranks nothing.

    Args:
        plan: plan.json's content.
        weights: returns the checkpoint's tensors by name.
    """
    return weights(plan["head"])[plan["answers"]].float() if plan["task"] == RANK else None


def _batches(texts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield batches [texts, n] of neighbouring texts of equal length, of at most BATCH tokens or a single text."""
    for length, alike in groupby(texts, len):
        yield from torch.split(torch.stack(list(alike)), max(1, BATCH // length))


def _layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """Return a model's list of layers and its name: the first ModuleList that has `count` modules."""
    return next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    )


def passages(tokens: Sequence[int], bucket: int, task: str) -> list[list[int]]:
    """Return the texts on which a bucket's program is compared: the tokens in pieces of equal length.

    A piece fills the bucket, or is short if texts are classified as a whole. The last piece may be shorter.
    """
    size = min(bucket, SHORT) if task == CLASSIFY else bucket
    return [list(tokens[at : at + size]) for at in range(0, len(tokens), size)]
