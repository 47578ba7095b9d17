"""Programs that take passes of a few widths only: those of a range, described otherwise.

coremltools gives each input with enumerated shapes a symbol of its own, and can't tell that they stand for one T. So
the program is converted with a range, which the inputs share; only the description says which shapes there are. The
shapes of all inputs belong together by their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def enumerate_shapes(spec: Any, widths: Sequence[int]) -> None:
    """Describes the inputs of a Model_pb2.Model with a range of T by their shapes at these widths, in place."""
    for feature in spec.description.input:
        array = feature.type.multiArrayType
        ranges = [(bounds.lowerBound, bounds.upperBound) for bounds in array.shapeRange.sizeRanges]
        if all(low == high for low, high in ranges):  # a cache
            continue
        for width in widths:
            shape = [low if low == high else width for low, high in ranges]
            array.enumeratedShapes.shapes.add(shape=shape)
