"""What a gate knows of a part before it runs: its inputs, and what transformers makes of them, never our own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.routed import Call, choosing, none_taken, taken_in_turn
from shardmill.gates.stored import StoredWeights
from shardmill.models.interface import LABELS
from shardmill.plan import Part
from shardmill.runtime.kv import Floats

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Case:
    """The inputs of any part, and transformers' results: pieces of the output's channels, each [n, channels].

    Attributes:
        rows: the part's inputs by name, except the host's arrays, each [n, channels]; of lent caches, the rows of the
            tokens, [n, heads * head_dim].
        expected: returns the results with the weights that the package contains.
        original: returns the results with the original weights.
        model: transformers' model, which `expected` runs.
        routes: the experts that tokens are routed to with the original weights, by layer, each [n, chosen].
        texts: of an encoder, the number of rows of each text.
        cut: of an encoder, returns the case of pieces of the texts, which do not fill a pass.
        fed: of a drafter's part, returns what `expected` returns for other rows of the inputs, joined.
    """

    rows: Mapping[str, Floats]
    expected: Callable[[], list[Tensor]]
    original: Callable[[], list[Tensor]]
    model: nn.Module
    routes: Mapping[int, Tensor] = field(default_factory=dict)
    texts: tuple[int, ...] = ()
    cut: Callable[[], Case] | None = None
    fed: Callable[[Mapping[str, Tensor]], Tensor] | None = None

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return len(next(iter(self.rows.values())))


def compared(
    rows: Mapping[str, Tensor], run: Callable[[Model, Mapping[str, Tensor]], Tensor], packaged: Model, exact: Model
) -> Case:
    """Return the case of two models that differ in their weights only, the package's and the original ones.

    Args:
        rows: the part's inputs by name, each [n, channels].
        run: computes a model's result [n, channels] for such rows.
        packaged: the model with the package's weights.
        exact: the model with the original weights.
    """

    @torch.no_grad()
    def result(model: Model, rows: Mapping[str, Tensor]) -> Tensor:
        return run(model, rows)

    arrays = {name: each.contiguous().numpy() for name, each in rows.items()}
    expected, original = (partial(result, model, rows) for model in (packaged, exact))
    return Case(arrays, lambda: [expected()], lambda: [original()], packaged, fed=partial(result, packaged))


def part_case(
    part: Part, reference: Reference, known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    """Return the case of a part of layers, a group of experts, or some rows of the LM head.

    Args:
        part: the part.
        reference: transformers' model.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d], logits
            [n or more, vocab] for a head, and experts if the model has any.
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    return CASES[part.kind](part, reference, known, source, stored)


def _head_case(
    part: Part, reference: Reference, known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    tokens = part.row_tokens if part.kind == LABELS else slice(part.start, part.end)
    last, head = known["hidden"][-1], partial(stored.rows, "lm_head.weight")
    exact = known["logits"][: len(last), tokens]

    def weights(name: str) -> Tensor:  # a bias of labels has other rows than the checkpoint's
        return stored.values(name) if name == "lm_head.bias" else stored(name)

    rows = {"hidden": last.numpy()}
    return Case(rows, lambda: [reference.logits(last, head(), weights)], lambda: [exact], reference.model)


def _layers_case(
    part: Part, reference: Reference, known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    hidden, model = known["hidden"], reference.model
    original = checkpoint_weights(source, stored.prefix)  # the experts' weights may be in other packages
    x, split, inputs = hidden[part.start], part.spec.ends_in_experts, dict[str, Floats]()
    if width := part.spec.graph.per_layer:
        reference.given(hidden[0], known["rows"])
        pieces = enumerate(torch.split(known["rows"], width, dim=1))
        inputs = {"embedded": hidden[0].numpy(), **{f"p_{i}": rows.numpy() for i, rows in pieces}}
    for i, _ in part.spec.lent:
        caches = reference.shared_caches(hidden[i], i, original)  # of one type of layers
        reference.lent |= caches
        (pair,) = caches.values()
        inputs |= {f"{name}_{i}": rows_of(each).numpy() for name, each in zip("kv", pair, strict=True)}
    weights = stored.over(original) if split else stored

    def exact_end() -> list[Tensor]:
        # The exact weights of the experts are left out: if a choice differs, they differ entirely; choices are counted
        # apart.
        return _at_end(reference, part, x, original)[:-1] if split else [hidden[part.end]]

    indices = range(part.start, part.end) if "experts" in known else ()
    routes = {index: known["experts"][index] for index in indices}
    return Case({"x": x.numpy()} | inputs, lambda: _at_end(reference, part, x, weights), exact_end, model, routes)


def rows_of(cache: Tensor) -> Tensor:
    """Return the rows of tokens [n, heads * head_dim] of keys or values [1, heads, n, head_dim]."""
    return cache[0].transpose(0, 1).flatten(1)


def cache_of(rows: Tensor, like: Tensor) -> Tensor:
    """Return keys or values [1, heads, n, head_dim] with the heads of others, given rows [n, heads * head_dim]."""
    return rows.reshape(len(rows), like.shape[1], like.shape[3]).transpose(0, 1)[None]


def _at_end(reference: Reference, part: Part, x: Tensor, weights: Weights) -> list[Tensor]:
    """Return the expected `hidden` output of a part, as pieces of its channels, each [n, channels].

    Normally that is one piece, the hidden states. If the part ends before experts, there are three pieces: the layer's
    output without the experts' contribution, the experts' input, and the weight of each expert.

    Args:
        reference: transformers' model.
        part: a part of layers.
        x: the part's input, [n, d].
        weights: the weights of the part's layers, including the experts.
    """
    indices, experts = range(part.start, part.end), part.spec.graph.experts
    if experts is None or not part.spec.ends_in_experts:
        return reference.layers(x, indices, weights)[-1:]
    with choosing(reference.model, part.end - 1, none_taken) as calls:
        stream = reference.layers(x, indices, weights)[-1]
    (call,) = calls
    return [stream, call.hidden, call.share(0, experts.count)]


def _experts_case(
    part: Part, reference: Reference, known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    """Return the case of a group of experts: every token is routed to experts of the group in turn."""
    assert part.layer is not None
    x, original = known["hidden"][part.layer], checkpoint_weights(source, stored.prefix)
    weights = stored.over(original)
    call, exact = experts_contribution(reference, part, x, original)
    index, values = taken_in_turn(part.start, part.end)(call)
    shares = Call(call.hidden, index, values).share(part.start, part.end)
    rows = {"x": call.hidden.numpy(), "weights": shares.numpy()}
    return Case(rows, lambda: [experts_contribution(reference, part, x, weights)[1]], lambda: [exact], reference.model)


def experts_contribution(
    reference: Reference, part: Part, x: Tensor, weights: Weights, fed: Tensor | None = None
) -> tuple[Call, Tensor]:
    """Return the call of the layer's experts, and the contribution of the group's experts to the layer's output [n, d].

    The contribution is a difference of two outputs, because only the layer knows its branch multiplier.

    Args:
        reference: transformers' model.
        part: the group.
        x: the layer's input, [n, d].
        weights: the weights of the whole layer.
        fed: [n, d], what the experts read in place of what the layer makes of x, if anything.
    """
    assert part.layer is not None
    layer = part.layer

    def run() -> Tensor:
        return reference.layers(x, [layer], weights)[-1]

    with choosing(reference.model, layer, none_taken):
        without = run()
    with choosing(reference.model, layer, taken_in_turn(part.start, part.end), fed) as calls:
        difference = run() - without
    return calls[0], difference[:, : part.spec.graph.hidden]


CASES = {"layers": _layers_case, "experts": _experts_case, "head": _head_case, LABELS: _head_case}
