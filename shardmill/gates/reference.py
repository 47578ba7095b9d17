"""The reference for parity: Hugging Face transformers' own forward pass, with few weights in memory at a time.

Nothing here depends on a family. The model is built without weights. Hooks load each layer's weights when the layer is
called and free them after it, see naming.py. Weights come from a callable, so the same code runs the original
checkpoint (what did INT8 and fp16 cost?) and the weights dequantised from the packages (is the program the graph?).
Everything is fp32, and attention is transformers' eager implementation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.checkpoint.headers import TensorInfo, read_tensors
from shardmill.convert.weights import read_info
from shardmill.gates import routed
from shardmill.gates.naming import Origin, Weights, load_parameters, loaded, loading, origins
from shardmill.gates.replacements import Blocks, Skipped, Unnormed, at_length, embedded_rows, replaced, without_weights
from shardmill.models.architecture import PREFIX, name_in_tower, name_under, prefix_of
from shardmill.models.hf_config import load_hf_config


def return_heap() -> None:
    """Return freed memory to the system."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim. Cached, because every CDLL creates a class that only the garbage collector frees."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


HEAD_ROWS = 4096  # rows of the LM head at a time: glibc reuses blocks of up to 32 MB, and frees larger ones


def checkpoint_weights(source: Path, prefix: str = "model.") -> Weights:
    """Return a lookup of the checkpoint's weights in their own dtype, memory-mapped and read when used.

    Args:
        source: the checkpoint's folder.
        prefix: begins the checkpoint's names where transformers' begin with "model.".
    """
    tensors: dict[str, TensorInfo] = read_tensors(source)

    def weights(name: str) -> Tensor:
        return read_info(tensors[name_under(prefix, name)], source)

    return weights


def checkpoint_origins(model: nn.Module, source: Path) -> dict[str, Origin]:
    """Return the origin of each parameter in the checkpoint's folder; for buffers without axes, their values.

    Origins have the names of a model that is only a decoder, as `checkpoint_weights` takes them.
    """
    tensors = read_tensors(source)
    prefix = prefix_of(tensors, PREFIX)
    tensors = {name_in_tower(prefix, name): info for name, info in tensors.items()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.ndim}
    read = {name: read_info(tensors[name], source) for name in buffers.keys() & tensors.keys()}
    return origins(model, tensors) | {name: Origin(value=value) for name, value in (buffers | read).items()}


def mapped_rows(weights: Weights, name: str) -> Iterator[Tensor]:
    """Yield a matrix in blocks of HEAD_ROWS rows, each mapped on request, so that earlier blocks can be freed."""
    for first in range(0, len(weights(name)), HEAD_ROWS):
        yield weights(name)[first : first + HEAD_ROWS]


def empty_model(source: Path, kind: str) -> Any:
    """Return transformers' model of a checkpoint's config, of the auto class `kind`, on the meta device."""
    import transformers

    options = {"attn_implementation": "eager", "dtype": torch.float32}  # the config's dtype would round buffers
    with without_weights():
        model = getattr(transformers, kind).from_config(load_hf_config(source), **options)
    return model.eval()


def _nothing(shape: torch.Size) -> Callable[[str], Tensor]:
    """Return a lookup that gives zeros for every name, which take no memory."""
    return lambda name: torch.zeros(()).expand(shape)


class Reference:
    """Transformers' model for a checkpoint's config, without weights."""

    def __init__(self, source: Path, context: int, carry: int = 0, often: bool = False) -> None:
        """Build the model on the meta device.

        Args:
            source: the folder with config.json and the headers of the weight files.
            context: the length of the whole sequence, which decides LongRoPE's factors.
            carry: channels that a layer passes to the next beside the hidden state. In all arguments and results here,
                these channels follow the hidden state.
            often: True if layers run thousands of times. Then memory that a layer has freed does not go back to the
                system (see `_give_back`): getting it again would take a sixth of the time.
        """
        self.model = empty_model(source, "AutoModelForCausalLM")
        self.decoder = self.model.model
        self.often = often
        self.embedded: tuple[Tensor, Tensor] | None = None  # see `given`
        self.lent: dict[str, tuple[Tensor, Tensor]] = {}  # by type, keys and values of layers that do not run
        self.carry, self.origins = carry, checkpoint_origins(self.model, source)
        for module in self.model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.forward = at_length(module.forward, context)

    @property
    def final_norm(self) -> str:
        """Return the name of the decoder's last norm: the first child with weights after the layers."""
        names = [name for name, child in self.decoder.named_children() if name == "layers" or list(child.parameters())]
        return str(names[names.index("layers") + 1])

    @property
    def tables(self) -> list[str]:
        """Return the names of the decoder's tables of tokens: the embedding, and possibly the table of its layers."""
        return [name for name, child in self.decoder.named_children() if isinstance(child, nn.Embedding)]

    @property
    def second(self) -> str:
        """Return the name of the decoder's second table of tokens, which its layers read; '' if it has none."""
        return "".join(self.tables[1:])

    def given(self, embedded: Tensor, rows: Tensor) -> None:
        """Keep what the tables give for the tokens of hidden states, for a decoder with a second table.

        Args:
            embedded: the first layer's input, [n, d].
            rows: the rows of the second table, [n, layers * width], as `run` returns them.
        """
        self.embedded = embedded, rows

    @torch.no_grad()
    def layers(self, hidden: Tensor, indices: Collection[int], weights: Weights) -> list[Tensor]:
        """Return the outputs of the layers in turn, each [n, d], for inputs [n, d] at positions 0 .. n - 1."""
        with (
            self._only(indices, hidden, weights) as outputs,
            replaced(self.decoder, self.final_norm, Unnormed()),
            self._fed(hidden) as fed,
        ):
            self.decoder(**fed, use_cache=False)
        self._give_back()
        return outputs[1:]

    @torch.no_grad()
    def logits(
        self,
        hidden: Tensor,
        head: Iterable[Tensor],
        weights: Weights,
        indices: Collection[int] = (),
        into: Tensor | None = None,
    ) -> Tensor:
        """Return logits [n, rows] for the last layer's outputs [n, d], or for the inputs of the last few layers.

        Args:
            hidden: these outputs or inputs, at positions 0 .. n - 1.
            head: rows of the LM head [rows, d] in blocks.
            weights: all other weights.
            indices: the layers that are still to run.
            into: memory for the head's results, [n, rows] in fp32, so that repeated calls need not allocate it.
        """
        with self._only(indices, hidden, weights), self._headed(head, weights, into), self._fed(hidden) as fed:
            result: Tensor = self.model(**fed, use_cache=False).logits[0]
        self._give_back()
        return result

    @torch.no_grad()
    def first(self, tokens: Sequence[int], table: Callable[[Tensor], Tensor], weights: Weights) -> Tensor:
        """Return the first layer's input [n, d] for tokens; the arguments are the same as for `run`."""
        with (
            self._only((), None, weights) as outputs,
            embedded_rows(self.decoder.get_input_embeddings(), torch.tensor([list(tokens)]), table) as places,
            replaced(self.decoder, self.final_norm, Unnormed()),
        ):
            self.decoder(input_ids=places, use_cache=False)
        return outputs[0]

    @torch.no_grad()
    def normed(self, hidden: Tensor, weights: Weights) -> Tensor:
        """Return the LM head's input [n, d] for the last layer's outputs [n, d]."""
        norm = getattr(self.decoder, self.final_norm)
        load_parameters(norm, f"model.{self.final_norm}.", self.origins, weights)
        result: Tensor = norm(self._stream(hidden)[None])[0]
        norm.to("meta")
        return result

    @torch.no_grad()
    def shared_caches(self, hidden: Tensor, index: int, weights: Weights) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the keys and values that a layer leaves for later layers, by its type; {} if it leaves none.

        Each is [1, heads, n, head_dim], for the layer's inputs [n, d] at positions 0 .. n - 1.
        """
        with (
            replaced(self, "lent", {}),  # which would be returned, too
            self._only((index,), hidden, weights),
            replaced(self.decoder, self.final_norm, Unnormed()),
            self._fed(hidden) as fed,
        ):
            caches = self.decoder(**fed, use_cache=False, return_shared_kv_states=True).shared_kv_states
        self._give_back()
        return dict(caches)

    @torch.no_grad()
    def run(
        self,
        tokens: Sequence[int],
        table: Callable[[Tensor], Tensor],
        head: Iterable[Tensor],
        weights: Weights,
        second: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run a whole forward pass: hidden [layers + 1, n, d], the first layer's input first, and logits [n, vocab].

        For a model with experts, also return experts [layers, n, chosen], the experts' indices, see routed.py. For a
        model with a second table of tokens, also return rows [n, layers * width], what the table gives for the tokens.

        Args:
            tokens: the n tokens.
            table: returns rows of the embedding table for ids.
            head: the LM head's rows [vocab, d] in blocks, in any float dtype.
            weights: all other weights.
            second: returns rows of the second table, if the model has one.
        """
        every, rows = range(len(self.decoder.layers)), list[Tensor]()
        with (
            self._only(every, None, weights) as outputs,
            self._headed(head, weights),
            embedded_rows(self.decoder.get_input_embeddings(), torch.tensor([list(tokens)]), table) as places,
            routed.observed(self.model) as chosen,
            ExitStack() as stack,
        ):
            if second:
                module = getattr(self.decoder, self.second)
                stack.enter_context(embedded_rows(module, torch.tensor([list(tokens)]), second))
                hook = module.register_forward_hook(lambda module, args, result: rows.append(result[0]))
                stack.callback(hook.remove)
            logits = self.model(input_ids=places, use_cache=False).logits[0]
        return_heap()
        tensors = {"hidden": torch.stack(outputs), "logits": logits} | ({"rows": rows[0]} if rows else {})
        return tensors | routed.by_layer(chosen, len(every))

    @contextmanager
    def _fed(self, hidden: Tensor) -> Iterator[dict[str, Any]]:
        """Yield the arguments of a decoder whose first running layer is fed with hidden states [n, d].

        A decoder with a second table looks tokens up, and its tables answer what was `given`, or zeros.
        """
        if not self.second:
            yield {"inputs_embeds": self._stream(hidden)[None]}
            return
        tables = [getattr(self.decoder, name) for name in self.tables]
        answers = self.embedded or [torch.zeros(len(hidden), table.embedding_dim) for table in tables]
        with ExitStack() as stack:
            for table, rows in zip(tables, answers, strict=True):
                stack.enter_context(replaced(table, "forward", lambda ids, rows=rows: rows[None]))
            lent = {"shared_kv_states": dict(self.lent)} if self.lent else {}
            yield {"input_ids": torch.zeros(1, len(hidden), dtype=torch.long), **lent}

    def _stream(self, hidden: Tensor) -> Tensor:
        """Return hidden states without the carried channels."""
        return hidden[:, : hidden.shape[1] - self.carry]

    @contextmanager
    def _only(self, indices: Collection[int], hidden: Tensor | None, weights: Weights) -> Iterator[list[Tensor]]:
        """Restrict the decoder to some of its layers, fed with `hidden` [n, d] if given.

        Yield a list that collects the first of these layers' input and every layer's output, each [n, d].
        """
        every = self.decoder.layers
        chosen = nn.ModuleList([layer if i in indices else Skipped(layer, self.carry) for i, layer in enumerate(every)])
        feeding = min(indices, default=0)
        outputs: list[Tensor] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args = args if hidden is None else (*self._parted(hidden), *args[1 + bool(self.carry) :])
            outputs.append(self._joined(args))
            return args, kwargs

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            outputs.append(self._joined(result if isinstance(result, tuple) else (result,)))

        with ExitStack() as stack, replaced(self.decoder, "layers", chosen):
            for name, parameter in dict(self.decoder._parameters).items():  # used before the first layer
                zeros = torch.zeros(parameter.shape)
                value = zeros if hidden is not None else loaded(f"model.{name}", self.origins, weights)
                stack.enter_context(replaced(self.decoder, name, nn.Parameter(value, requires_grad=False)))
            stack.callback(chosen[feeding].register_forward_pre_hook(before, with_kwargs=True).remove)
            for i in indices:
                stack.callback(chosen[i].register_forward_hook(after).remove)
            running = {f"model.layers.{i}.": chosen[i] for i in indices}
            for name, child in self._beside():
                if indices:
                    running[f"model.{name}."] = child
                else:  # no layer reads what it makes
                    only = next(child.parameters())
                    stack.enter_context(loading({f"model.{name}.": child}, {}, _nothing(only.shape), self._give_back))
            stack.enter_context(loading(running, self.origins, weights, self._give_back))
            yield outputs

    def _beside(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the decoder's modules with weights that are neither tables, layers nor the last norm, by name."""
        for name, child in self.decoder.named_children():
            other = name not in ("layers", self.final_norm) and not isinstance(child, nn.Embedding)
            if other and list(child.parameters()):
                yield name, child

    def _give_back(self) -> None:
        """Return freed memory to the system, unless layers run too often for that."""
        if not self.often:
            return_heap()

    def _parted(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return a layer's first arguments, each with a batch axis, from [n, d]."""
        stream = self._stream(hidden)[None]
        return (stream, hidden[None, :, stream.shape[2] :]) if self.carry else (stream,)

    def _joined(self, passed: tuple[Any, ...]) -> Tensor:
        """Return [n, d] from the first arguments or results of a layer."""
        stream: Tensor = passed[0][0]
        if not self.carry:
            return stream
        carried = torch.zeros(len(stream), self.carry) if passed[1] is None else passed[1][0]
        return torch.cat([stream, carried], dim=1)

    @contextmanager
    def _headed(self, head: Iterable[Tensor], weights: Weights, into: Tensor | None = None) -> Iterator[None]:
        """Give the model its last norm's weights, and an LM head that multiplies block by block."""
        norm = getattr(self.decoder, self.final_norm)
        load_parameters(norm, f"model.{self.final_norm}.", self.origins, weights)
        bias = None if self.model.lm_head.bias is None else weights("lm_head.bias").float()
        with replaced(self.model, "lm_head", Blocks(head, bias, into)):
            yield
        norm.to("meta")


Steps = Generator[Tensor, int, None]  # yields the logits [rows] of a draft's next token, and is sent the token


@dataclass(frozen=True)
class ReferenceDrafter:
    """A drafter out of transformers' modules, with the packages' weights.

    Attributes:
        kind: the name by which decoding knows the drafter.
        ids: the model's token of each row of the drafter's LM head.
        modules: the modules that compute.
        begin: given the model's hidden states [layers + 1, n, d], returns what drafts after a context of up to n + 1
            tokens. A draft sees the states before the context's last token.
    """

    kind: str
    ids: Sequence[int]
    modules: Sequence[nn.Module]
    begin: Callable[[Tensor], Callable[[Sequence[int]], Steps]]


def carried_channels(plan: Mapping[str, Any]) -> int:
    """Return how many channels a token carries beside the residual stream, given plan.json's content."""
    layers = next(part for part in plan["parts"] if part["kind"] == "layers")
    width: int = layers["inputs"]["x"][1] - plan["architecture"]["graph"]["hidden"]
    return width
