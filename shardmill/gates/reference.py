"""The reference for parity: Hugging Face transformers' own forward pass, one layer's weights in memory at a time.

Nothing here knows a family. The model is built without weights; hooks give each layer its own when it is called and
take them away after it. Weights come from a callable, so the same code runs the original checkpoint (what did INT8 and
fp16 cost?) and the weights dequantised from the packages (is the program the graph?). Everything is fp32, attention is
transformers' eager.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.checkpoint.headers import TensorInfo, read_tensors
from shardmill.convert.weights import read_info
from shardmill.models.hf_config import load_hf_config

HEAD_ROWS = 16384
Weights = Callable[[str], Tensor]  # transformers' name of a parameter -> values in any float dtype


def checkpoint_weights(source: Path, prefix: str = "model.") -> Weights:
    """The checkpoint's own weights in their own dtype, mapped and read when used.

    Args:
        source: the checkpoint's folder.
        prefix: begins the checkpoint's names where transformers' begin with "model.".
    """
    tensors: dict[str, TensorInfo] = read_tensors(source)

    def weights(name: str) -> Tensor:
        return read_info(
            tensors[prefix + name.removeprefix("model.")] if name.startswith("model.") else tensors[name], source
        )

    return weights


class Reference:
    """transformers' model of a checkpoint's config, without weights."""

    def __init__(self, source: Path, context: int) -> None:
        """Builds it.

        Args:
            source: the folder with config.json.
            context: the length of the whole sequence, which decides LongRoPE's factors.
        """
        from transformers import AutoModelForCausalLM

        options = {"attn_implementation": "eager", "dtype": torch.float32}  # the config's dtype would round buffers
        with without_weights():
            self.model = AutoModelForCausalLM.from_config(load_hf_config(source), **options)  # type: ignore[no-untyped-call]
        self.model.eval()
        self.decoder = self.model.model
        for module in self.model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.forward = _at_length(module.forward, context)

    @property
    def final_norm(self) -> str:
        """Name of the last norm in the decoder: its only child with weights beside the embedding and the layers."""
        children: dict[str, Any] = {name: list(child.parameters()) for name, child in self.decoder.named_children()}
        (found,) = (name for name, own in children.items() if own and name not in ("embed_tokens", "layers"))
        return found

    @torch.no_grad()
    def layers(self, hidden: Tensor, indices: Collection[int], weights: Weights) -> list[Tensor]:
        """Outputs of the layers in turn, each [n, d], for inputs [n, d] at positions 0 .. n - 1."""
        with self._only(indices, hidden, weights) as outputs, replaced(self.decoder, self.final_norm, nn.Identity()):
            self.decoder(inputs_embeds=hidden[None], use_cache=False)
        give_back()
        return outputs[1:]

    @torch.no_grad()
    def logits(self, hidden: Tensor, head: Iterable[Tensor], weights: Weights) -> Tensor:
        """Logits [n, rows] of the last layer's outputs [n, d]. Args: head rows of the LM head [rows, d] in blocks."""
        with self._only((), hidden, weights), self._headed(head, weights):
            result: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return result

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], table: Callable[[Tensor], Tensor], head: Iterable[Tensor], weights: Weights
    ) -> dict[str, Tensor]:
        """A whole forward pass: hidden [layers + 1, n, d], the first layer's input first, and logits [n, vocab].

        Args:
            tokens: n of them.
            table: gives rows of the embedding for ids.
            head: the LM head's rows [vocab, d] in blocks, in any float dtype.
            weights: of everything else.
        """
        ids, places = torch.unique(torch.tensor(list(tokens)), return_inverse=True)  # a table of those that occur
        rows = nn.Parameter(table(ids).float(), requires_grad=False)
        embed, every = self.decoder.embed_tokens, range(len(self.decoder.layers))
        with (
            self._only(every, None, weights) as outputs,
            self._headed(head, weights),
            replaced(embed, "weight", rows),
            replaced(embed, "padding_idx", None),
        ):
            logits = self.model(input_ids=places[None], use_cache=False).logits[0]
        give_back()
        return {"hidden": torch.stack(outputs), "logits": logits}

    @contextmanager
    def _only(self, indices: Collection[int], hidden: Tensor | None, weights: Weights) -> Iterator[list[Tensor]]:
        """Lets the decoder run some of its layers only, fed with `hidden` [n, d] where it is given.

        Yields the first of these layers' input and every layer's output, each [n, d], as they come about.
        """
        own = self.decoder.layers
        chosen = nn.ModuleList([layer if i in indices else _Skipped(layer) for i, layer in enumerate(own)])
        feeding = min(indices, default=0)
        outputs: list[Tensor] = []

        def before(index: int) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if index == feeding:
                    args = args if hidden is None else (hidden[None], *args[1:])
                    outputs.append(args[0][0])
                if index in indices:
                    load(module, f"model.layers.{index}.", weights)
                return args, kwargs

            return hook

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            outputs.append((result[0] if isinstance(result, tuple) else result)[0])
            module.to("meta")
            give_back()

        with ExitStack() as stack, replaced(self.decoder, "layers", chosen):
            for i, layer in enumerate(chosen):
                stack.callback(layer.register_forward_pre_hook(before(i), with_kwargs=True).remove)
                if i in indices:
                    stack.callback(layer.register_forward_hook(after).remove)
            yield outputs

    @contextmanager
    def _headed(self, head: Iterable[Tensor], weights: Weights) -> Iterator[None]:
        """Gives the model its last norm's weights, and an LM head that multiplies block by block."""
        norm = getattr(self.decoder, self.final_norm)
        load(norm, f"model.{self.final_norm}.", weights)
        with replaced(self.model, "lm_head", _Blocks(head)):
            yield
        norm.to("meta")


class _Skipped(nn.Module):
    """Stands for a layer that is not run; it has what the decoder asks a layer for."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class _Blocks(nn.Module):
    """An LM head whose rows [vocab, d] come in blocks: in fp32 all of them may take gigabytes."""

    def __init__(self, rows: Iterable[Tensor]) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden @ rows.float().T for rows in self.rows], dim=-1)


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made within have parameters on the meta device, but real buffers."""
    register = nn.Module.register_parameter

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        meta = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, meta)

    nn.Module.register_parameter = empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _at_length(forward: Callable[..., Any], context: int) -> Callable[..., Any]:
    """A rotary module's forward as it is for a sequence of `context` tokens, of which a test may feed fewer."""

    def longer(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        tables = forward(x, torch.arange(context)[None], *args, **kwargs)
        return tuple(table[:, position_ids[0]] for table in tables)

    return longer


def give_back() -> None:
    """Returns freed memory to the system: glibc keeps what lies between blocks in use, hundreds of MB by now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def load(module: nn.Module, prefix: str, weights: Weights) -> None:
    """Assigns a module's weights, in fp32."""
    module.load_state_dict({name: weights(prefix + name).float() for name in module.state_dict()}, assign=True)
