"""Expected outputs at the end of a part of layers, which may be inside a layer, before its experts."""

from __future__ import annotations

from torch import Tensor

from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference
from shardmill.gates.routed import choosing, none_taken
from shardmill.plan import Part


def at_end(reference: Reference, part: Part, x: Tensor, weights: Weights) -> list[Tensor]:
    """Return the expected `hidden` output of a part, as pieces of its channels, each [n, channels].

    Normally that is one piece, the hidden states. If the part ends before experts, there are three pieces: the layer's
    output without the experts' contribution, the experts' input, and the weight of each expert.

    Args:
        reference: transformers' model.
        part: a part of layers.
        x: the part's input, [n, d].
        weights: the weights of the part's layers, including the experts.
    """
    indices, experts = range(part.start, part.end), part.graph.experts
    if experts is None or not part.blueprint.ends_in_experts:
        return reference.layers(x, indices, weights)[-1:]
    with choosing(reference.model, part.end - 1, none_taken) as calls:
        stream = reference.layers(x, indices, weights)[-1]
    (call,) = calls
    return [stream, call.hidden, call.share(0, experts.count)]
