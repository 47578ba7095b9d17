"""Parity of a group of experts: what its program adds to the residual stream, against transformers' layer.

There every token takes experts of the group only, in turn, so that all of them are compared, whatever the router would
choose; which it chooses is compared where the router lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.routed import Call, choosing, none_taken, taken_in_turn
from shardmill.gates.stateless import stateless_parity
from shardmill.gates.weights import PackageWeights
from shardmill.models.host import Floats
from shardmill.plan import Part


def added(reference: Reference, part: Part, x: Tensor, weights: Weights) -> tuple[Call, Tensor]:
    """What the layer's experts are called with, and what those of the group add to its output [n, d].

    The latter is a difference of two outputs, for only the layer knows what its branch is multiplied with.

    Args:
        reference: transformers' model.
        part: the group.
        x: the layer's input, [n, d].
        weights: of the whole layer.
    """

    def run() -> Tensor:
        return reference.layers(x, [part.layer], weights)[-1]

    with choosing(reference.model, part.layer, none_taken):
        without = run()
    with choosing(reference.model, part.layer, taken_in_turn(part.start, part.end)) as calls:
        difference = run() - without
    return calls[0], difference[:, : part.graph.hidden]


def group_parity(
    program: Path,
    part: Part,
    reference: Reference,
    known: Mapping[str, Tensor],
    source: Path,
    stored: PackageWeights,
    verify: int,
) -> Iterator[Measurement | NotRun]:
    """All measurements of a group of experts but those of its weights.

    Args:
        program: the compiled bundle.
        part: what it was made from.
        reference: transformers' model.
        known: what transformers makes of the text with the original weights: hidden [layers + 1, n, d].
        source: the checkpoint's folder.
        stored: the package's weights.
        verify: the most tokens of a decode pass.
    """
    original = checkpoint_weights(source, stored.prefix)
    call, exact = added(reference, part, known["hidden"][part.layer], original)
    index, values = taken_in_turn(part.start, part.end)(call)
    z, shares = call.hidden.numpy(), Call(call.hidden, index, values).share(part.start, part.end).numpy()

    def inputs(numbers: list[int]) -> dict[str, Floats]:
        return {"x": _columns(z[numbers]), "weights": _columns(shares[numbers])}

    def expected() -> Tensor:
        return added(reference, part, known["hidden"][part.layer], stored.over(original))[1]

    yield from stateless_parity(inputs, program, part, expected, exact, verify, reference.model)


def _columns(rows: Floats) -> Floats:
    """[T, channels] as programs take it: [1, channels, T, 1]."""
    return rows.T[None, :, :, None]
