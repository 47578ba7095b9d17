"""The place and content of each of a program's weights in the weight file; the shortest weights lie in the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.convert import blob
from shardmill.convert.codes import Codes
from shardmill.convert.package import HALF, StampError, main_block, weight_sites
from shardmill.convert.stream import Content, LiteralWeight, Palette, Weight, bands
from shardmill.convert.weights import PartWeights
from shardmill.forms.form import FP16, form
from shardmill.models.part_kinds import computed, stem
from shardmill.plan import Part

# Types of numbers: the name in MIL, and the name of the blob type.
KINDS = {
    "FLOAT16": "FP16",
    "INT8": "INT8",
    "INT4": "INT4",
    "UINT4": "UINT4",
    "UINT6": "UINT6",
    "UINT8": "UINT8",
}


def inline_constants(part: Part) -> dict[str, str]:
    """Return the paths of the weights that the program itself holds, by the constants' names in it."""
    lengths = {path: math.prod(shape) for path, shape in part.shapes.items()}
    lengths |= {path: values.size for path, values in computed(part.spec).items()}
    return {f"{stem(path)}{HALF}": path for path, length in lengths.items() if length < blob.SMALLEST}


def fill_inline(spec: Any, part: Part, source: Path, codes: Codes | None = None) -> None:
    """Write the short weights into the program as coremltools does: the bytes of fp16 numbers.

    Args:
        spec: the program.
        part: the part whose program it is.
        source: the checkpoint's folder.
        codes: a file with values to use instead of the checkpoint's.

    Raises:
        CheckpointError: for a weight that fp16 can't hold.
        StampError: if the program lacks one of the short weights.
    """
    left, weights, literals = inline_constants(part), PartWeights(part, source), computed(part.spec)
    for operation in main_block(spec).operations:
        path = left.pop(operation.outputs[0].name, None) if operation.type == "const" else None
        if path is not None:
            values = codes.values(path) if codes else None
            if values is None:
                values = np.asarray(literals[path] if path in literals else weights[path].half().numpy(), np.float16)
            operation.attributes["val"].immediateValue.tensor.bytes.values = values.tobytes()
    if left:
        raise StampError(f"{next(iter(left))}: a tensor of {part.name} that its program does not use")


def place(
    spec: Any, part: Part, forms: Mapping[str, str], codes: Codes | None = None
) -> tuple[list[blob.WeightBlob], list[Content]]:
    """Place every weight of a program in the weight file, in the order of use; return the blobs and their contents.

    Args:
        spec: the program.
        part: the part whose program it is.
        forms: the forms of the part's matrices in the program, by path.
        codes: codes to use instead of rounding to nearest, or None.

    Raises:
        StampError: if the program's weights are not the part's tensors.
        ShardmillError: if the codes do not fit the weights.
    """
    sites = list(weight_sites(spec))
    blobs = blob.place_blobs([_kind_and_count(value) for _, values in sites for value in values])
    elsewhere = inline_constants(part).values()
    shapes = {stem(path): path for path in part.shapes if path not in elsewhere}
    literals = {stem(path): tuple(values.ravel().tolist()) for path, values in computed(part.spec).items()}
    left, contents = iter(blobs), list[Content]()
    for name, values in sites:
        offsets = [next(left) for _ in values]
        for value, where in zip(values, offsets, strict=True):
            value.blobFileValue.offset = where.offset
        if name in literals:
            contents.append(LiteralWeight(literals[name], offsets[0].data))
            continue
        if name not in shapes or math.prod(extents(values[0])) != math.prod(part.shapes[shapes[name]]):
            raise StampError(f"{name}: the program's weight of {extents(values[0])} is no tensor of {part.name}")
        path, places = shapes.pop(name), [where.data for where in offsets]
        known = codes.contents(path, forms.get(path, FP16), part.shapes[path], places) if codes else None
        contents += known or _constant_weights(part, path, forms.get(path, FP16), places)
    if unused := sorted({*shapes, *(stem(tensor.path) for tensor in part.tensors if tensor.path not in part.shapes)}):
        raise StampError(f"{unused[0]}: a tensor of {part.name} that its program does not use")
    return blobs, contents


def _constant_weights(part: Part, path: str, name: str, places: list[int]) -> list[Content]:
    """Return the contents of a constant's places: one palette, or one weight for each band of rows.

    Raises StampError if the blocks do not fill the constant, or if a band begins within a byte.
    """
    row_ranges, wanted = bands([tensor for tensor in part.tensors if tensor.path == path]), form(name)
    count = sum(math.prod(tensor.shape) for band in row_ranges for tensor in band.tensors)
    if count != math.prod(part.shapes[path]):
        raise StampError(f"{stem(path)}: the tensors of {part.name} hold {count} numbers of {list(part.shapes[path])}")
    if wanted.kind == "palette":
        data, tables = places
        return [Palette(tuple(row_ranges), data, tables, wanted)]
    columns = part.shapes[path][-1] if len(part.shapes[path]) > 1 else 1
    if odd := [band for band in row_ranges if band.row * columns * wanted.bits % 8]:
        raise StampError(f"{odd[0].label}: begins within a byte of {path} in {name}; give that another form")
    data, *scales = places
    return [
        Weight(
            band,
            data + band.row * columns * wanted.bits // 8,
            scales[0] + 2 * band.row if scales else None,
            wanted,
        )
        for band in row_ranges
    ]


def extents(value: Any) -> list[int]:
    """Return the shape of a protobuf value."""
    return [dimension.constant.size for dimension in value.type.tensorType.dimensions]


def _kind_and_count(value: Any) -> tuple[int, int]:
    """Return the blob type for a protobuf value, and how many numbers the value holds."""
    from coremltools.proto import MIL_pb2

    kinds = {getattr(MIL_pb2, name): getattr(blob, KINDS[name]) for name in KINDS}
    return kinds[value.type.tensorType.dataType], math.prod(extents(value))
