"""The reference for encoders: transformers' own forward pass, one layer's weights in memory at a time.

As in gates/reference.py, nothing here depends on a family, weights come from a callable, and all is fp32 and eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.checkpoint.headers import read_tensors
from shardmill.gates.naming import Weights, loaded, origins
from shardmill.gates.reference import replaced, return_heap, without_weights
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL
from shardmill.models.hf_config import load_hf_config

CLASSES = {
    LABEL: "AutoModelForTokenClassification",
    CLASSIFY: "AutoModelForSequenceClassification",
    EMBED: "AutoModel",
}
BATCH = 256  # tokens that go through a layer at once: more would cost memory and save little time
SHORT = 16  # tokens of a text that is classified as a whole, so that the reference has several such texts


class EncoderReference:
    """transformers' encoder of a checkpoint's config, without weights."""

    def __init__(self, source: Path, task: str) -> None:
        """Build the model on the meta device.

        Args:
            source: the folder with config.json.
            task: the model's task, which decides its head.
        """
        import transformers

        options = {"attn_implementation": "eager", "dtype": torch.float32}
        config = load_hf_config(source)
        with without_weights():
            self.model = getattr(transformers, CLASSES[task]).from_config(config, **options)
        if getattr(self.model, "pooler", None) is not None:
            self.model.pooler = None  # an embedding is computed from hidden states
        self.model.eval()
        self.origins = origins(self.model, read_tensors(source))
        self.path, self.layers = _layers(self.model, config.num_hidden_layers)

    @torch.no_grad()
    def run(self, texts: Sequence[Sequence[int]], rows: Callable[[Tensor], Tensor], weights: Weights) -> list[Tensor]:
        """Return the output for each text: a row [n, labels or d] for each token, or [1, labels] for the whole text.

        Args:
            texts: the tokens of each text.
            rows: returns rows of the embedding table for ids.
            weights: all other weights, by transformers' names.
        """
        ids, places = torch.unique(torch.cat([torch.tensor(list(text)) for text in texts]), return_inverse=True)
        embed = self.model.get_input_embeddings()
        table = nn.Parameter(rows(ids).float(), requires_grad=False)
        with replaced(embed, "weight", table), replaced(embed, "padding_idx", None):
            self._load_around(embed, weights)
            return self._forward(torch.split(places, [len(text) for text in texts]), weights)

    def _forward(self, texts: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        """Return the output for each text. A layer's weights are read again for each batch of texts."""
        hooks = []
        for index, layer in enumerate(self.layers):

            def before(module: nn.Module, args: Any, prefix: str = f"{self.path}.{index}.") -> None:
                found = {name: loaded(prefix + name, self.origins, weights) for name in module.state_dict()}
                module.load_state_dict(found, assign=True)

            def after(module: nn.Module, args: Any, result: Any) -> None:
                module.to("meta")

            hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        try:
            found = [out for batch in _batches(texts) for out in self._outputs(self.model(input_ids=batch))]
        finally:
            for hook in hooks:
                hook.remove()
        return_heap()
        return found

    def _load_around(self, embed: nn.Module, weights: Weights) -> None:
        """Load the model's weights, but not the layers' weights and the token embedding table."""
        for name, module in self.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if module is not embed and not name.startswith(f"{self.path}."):
                for key in own:
                    value = loaded(f"{name}.{key}" if name else key, self.origins, weights)
                    setattr(module, key, nn.Parameter(value, requires_grad=False))

    def _outputs(self, result: Any) -> Iterator[Tensor]:
        """Yield [n, labels or d] or [1, labels] for each text of a batch."""
        out: Tensor = result.logits if "logits" in result else result.last_hidden_state
        yield from (each.reshape(-1, each.shape[-1]) for each in out)


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
