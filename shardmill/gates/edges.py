"""What transformers has where a part of layers ends, which may be in the middle of a layer, before its experts."""

from __future__ import annotations

from torch import Tensor

from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference
from shardmill.gates.routed import choosing, none_taken
from shardmill.plan import Part


def at_end(reference: Reference, part: Part, x: Tensor, weights: Weights) -> list[Tensor]:
    """What a part's `hidden` should hold, piece by piece of its channels, each [n, channels].

    The hidden states; or, before experts, the layer's output as it is where they give nothing, what they are called
    with, and the weight of each.

    Args:
        reference: transformers' model.
        part: of layers.
        x: its input, [n, d].
        weights: of its layers, the experts included.
    """
    indices, experts = range(part.start, part.end), part.graph.experts
    if experts is None or not part.blueprint.ends_in_experts:
        return reference.layers(x, indices, weights)[-1:]
    with choosing(reference.model, part.end - 1, none_taken) as calls:
        stream = reference.layers(x, indices, weights)[-1]
    (call,) = calls
    return [stream, call.hidden, call.share(0, experts.count)]
