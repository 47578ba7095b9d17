"""Parity of a group of experts: its program's contribution to the residual stream, against transformers' layer.

In this gate every token is routed to experts of the group only, in turn, so that all experts are compared, whatever the
router would choose. The router's choices are compared in the part that contains the router.
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
    """Return the call of the layer's experts, and the contribution of the group's experts to the layer's output [n, d].

    The contribution is a difference of two outputs, because only the layer knows its branch multiplier.

    Args:
        reference: transformers' model.
        part: the group.
        x: the layer's input, [n, d].
        weights: the weights of the whole layer.
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
    """Yield all measurements of a group of experts; rounding.py measures its weights.

    Args:
        program: the compiled bundle.
        part: the part that was converted to the program.
        reference: transformers' model.
        known: transformers' results for the text with the original weights: hidden [layers + 1, n, d].
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
    """Return [T, channels] in the layout of a program's inputs: [1, channels, T, 1]."""
    return rows.T[None, :, :, None]
