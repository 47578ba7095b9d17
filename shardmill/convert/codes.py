"""What a quantiser decided on a part's matrices, as a file: conversion takes it in place of rounding to nearest.

A safetensors file, in which a matrix PATH of the part has, for one FORM of it or several,

    PATH.FORM.codes   I8 [rows, columns]         an integer for each number: -128 to 127 of int8, -8 to 7 of int4
    PATH.FORM.scale   F16 [rows]                 what to multiply them by
    PATH.FORM.codes   U8 [rows, columns]         or, of a palette, indices
    PATH.FORM.lut     F16 [tables, entries]      into its tables

of which conversion takes those of the form that a recipe gives to the matrix. Any constant PATH of the part, of any
shape, can have fp16 values of its own in place of the checkpoint's: what a quantiser folded into it. What the file does
not name is made from the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.checkpoint.headers import TensorInfo, read_header
from shardmill.convert import blob
from shardmill.convert.stream import Content, Given, Made, Palette, Weight, bands
from shardmill.convert.template.pattern import StampError, main_block
from shardmill.convert.weights import PartWeights
from shardmill.errors import ShardmillError
from shardmill.forms.form import FP16, MATRIX, Shape, form, is_form
from shardmill.models.contract import computed, stem
from shardmill.plan import Part

CODES, SCALE, LUT = "codes", "scale", "lut"
HALF = "F16"


class Codes:
    """A file of codes."""

    def __init__(self, file: Path, part: Part, forms: Mapping[str, str]) -> None:
        """Reads the file's header.

        Args:
            file: the file.
            part: the part that it is for.
            forms: of the part's matrices.

        Raises:
            ShardmillError: the file holds what does not fit the part or the forms.
        """
        self.folder, self.name = file.parent, file.name
        self.tensors = {info.name: info for info in read_header(file.parent, file.name)}
        self.forms = forms
        expected: dict[str, tuple[str, Shape]] = {}
        for path, shape in part.shapes.items():
            if path in self.tensors:
                expected[path] = (HALF, shape)
            elif self.names(path):
                expected |= _expected(self._stem(path), shape, forms.get(path, FP16))
        for name, (dtype, shape) in expected.items():
            held = self.tensors.get(name)
            if held is None or (held.dtype, held.shape) != (dtype, shape):
                found = "nothing" if held is None else f"{held.dtype} {list(held.shape)}"
                raise ShardmillError(f"{self.name}: {name} is {found}, must be {dtype} {list(shape)}; make codes again")
        if strange := [name for name in sorted(self.tensors.keys() - expected) if not self._is_of_another_form(name)]:
            raise ShardmillError(f"{self.name}: {strange[0]} belongs to nothing of {part.name}; make codes again")

    def names(self, path: str) -> bool:
        """Whether a constant has values or codes of its own here."""
        return path in self.tensors or f"{self._stem(path)}.{CODES}" in self.tensors

    def _stem(self, path: str) -> str:
        """How the names of a matrix' codes begin."""
        return f"{path}.{self.forms.get(path, FP16)}"

    def _is_of_another_form(self, name: str) -> bool:
        """Whether a tensor belongs to a form that its matrix could have had."""
        stem, _, what = name.rpartition(".")
        path, _, other = stem.rpartition(".")
        return what in (CODES, SCALE, LUT) and path in self.forms and is_form(other) and other != self.forms[path]

    def contents(self, path: str, name: str, shape: Shape, places: list[int]) -> list[Made]:
        """What goes into a constant's places; nothing if the file does not name it.

        Args:
            path: the constant's.
            name: its form's.
            shape: the constant's.
            places: where its numbers begin in the weight file, then its scales or tables.
        """
        wanted = form(name if len(shape) == MATRIX else FP16)
        if path in self.tensors:
            if wanted.kind != "fp16":
                raise ShardmillError(f"{self.name}: {path} is stored in {name}; give codes, not values")
            return [Made(self.tensors[path], self.folder, places[0], wanted.bits)]
        if not self.names(path):
            return []
        least, most = (-wanted.levels - 1, wanted.levels) if wanted.kind == "int" else (0, 2**wanted.bits - 1)
        beside = self.tensors[f"{self._stem(path)}.{SCALE if wanted.kind == 'int' else LUT}"]
        return [
            Made(self.tensors[f"{self._stem(path)}.{CODES}"], self.folder, places[0], wanted.bits, least, most),
            Made(beside, self.folder, places[1], 16),
        ]

    def values(self, path: str) -> NDArray[np.float16] | NDArray[np.int8] | NDArray[np.uint8] | None:
        """A tensor of the file, mapped; None if there is none of that name."""
        info = self.tensors.get(path)
        return None if info is None else mapped(info, self.folder)


def _expected(path: str, shape: Shape, name: str) -> dict[str, tuple[str, Shape]]:
    """The tensors of a matrix that has codes, with their types and shapes."""
    wanted = form(name)
    if wanted.kind == "palette":
        tables = wanted.tables(shape[0]), 2**wanted.bits
        return {f"{path}.{CODES}": ("U8", shape), f"{path}.{LUT}": (HALF, tables)}
    if wanted.kind == "int":
        return {f"{path}.{CODES}": ("I8", shape), f"{path}.{SCALE}": (HALF, shape[:1])}
    raise ShardmillError(f"{path}.{CODES}: the matrix is stored in {name}, which has no codes; give {path}")


def mapped(info: TensorInfo, folder: Path) -> NDArray[np.float16] | NDArray[np.int8] | NDArray[np.uint8]:
    """A tensor of a safetensors file."""
    dtype = {"I8": np.int8, "U8": np.uint8, HALF: np.float16}[info.dtype]
    if not prod(info.shape):
        return np.zeros(info.shape, dtype)
    return np.memmap(folder / info.file, dtype, "r", info.start, info.shape)


# Types of numbers: what MIL calls them, and the blob that holds them.
KINDS = {
    "FLOAT16": "FP16",
    "INT8": "INT8",
    "INT4": "INT4",
    "UINT4": "UINT4",
    "UINT6": "UINT6",
    "UINT8": "UINT8",
}


def inline(part: Part) -> dict[str, str]:
    """Return the paths of the weights that the program itself holds, by the constants' names in it."""
    lengths = {path: math.prod(shape) for path, shape in part.shapes.items()}
    lengths |= {path: len(values) for path, values in computed(part.blueprint).items()}
    return {f"{stem(path)}_to_fp16": path for path, length in lengths.items() if length < blob.SMALLEST}


def clear_inline(spec: Any, part: Part) -> None:
    """Replace the numbers of short weights in a program by references to the weight file.

    Two samples then have equal operations there, and code that finds weights by such references finds these too.
    """
    names = inline(part)
    for operation in main_block(spec).operations:
        if operation.type == "const" and operation.outputs[0].name in names:
            operation.attributes["val"].blobFileValue.SetInParent()


def fill_inline(spec: Any, part: Part, source: Path, codes: Codes | None = None) -> None:
    """Write the short weights into the program as coremltools does: the bytes of fp16 numbers.

    Args:
        spec: the program.
        part: the part that the program was converted from.
        source: the checkpoint's folder.
        codes: a file with values to use instead of the checkpoint's.

    Raises:
        CheckpointError: for a weight that fp16 can't hold.
        StampError: if the program lacks one of the short weights.
    """
    left, weights, given = inline(part), PartWeights(part, source), computed(part.blueprint)
    for operation in main_block(spec).operations:
        path = left.pop(operation.outputs[0].name, None) if operation.type == "const" else None
        if path is not None:
            values = codes.values(path) if codes else None
            if values is None:
                values = np.asarray(given[path] if path in given else weights[path].half().numpy(), np.float16)
            operation.attributes["val"].immediateValue.tensor.bytes.values = values.tobytes()
    if left:
        raise StampError(f"{next(iter(left))}: a tensor of {part.name} that its program does not use")


def place(
    spec: Any, part: Part, forms: Mapping[str, str], codes: Codes | None = None
) -> tuple[list[blob.Blob], list[Content]]:
    """Gives every weight of the program its place in the weight file, in the order of use, and says what goes there.

    Args:
        spec: the program.
        part: what it is made from.
        forms: of the part's matrices, as the program has them.
        codes: what takes the place of rounding to nearest, if anything does.

    Raises:
        StampError: where the program's weights are not the part's tensors.
        ShardmillError: where the codes do not fit them.
    """
    sites = list(weight_sites(spec))
    blobs = blob.lay_out([_kind_and_count(value) for _, values in sites for value in values])
    elsewhere = inline(part).values()
    shapes = {stem(path): path for path in part.shapes if path not in elsewhere}
    given = {stem(path): values for path, values in computed(part.blueprint).items()}
    left, contents = iter(blobs), list[Content]()
    for name, values in sites:
        offsets = [next(left) for _ in values]
        for value, where in zip(values, offsets, strict=True):
            value.blobFileValue.offset = where.offset
        if name in given:
            contents.append(Given(given[name], offsets[0].data))
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
    """What goes into a constant's places, block by block of those that lie under each other.

    Raises StampError where the blocks do not fill it, or begin within a byte.
    """
    found, wanted = bands([tensor for tensor in part.tensors if tensor.path == path]), form(name)
    held = sum(math.prod(tensor.shape) for band in found for tensor in band.tensors)
    if held != math.prod(part.shapes[path]):
        raise StampError(f"{stem(path)}: the tensors of {part.name} hold {held} numbers of {list(part.shapes[path])}")
    if wanted.kind == "palette":
        data, tables = places
        return [Palette(tuple(found), data, tables, wanted)]
    columns = math.prod(part.shapes[path][1:])
    if odd := [band for band in found if band.row * columns * wanted.bits % 8]:
        raise StampError(f"{odd[0].label}: begins within a byte of {path} in {name}; give that another form")
    data, *scales = places
    return [
        Weight(
            band,
            data + band.row * columns * wanted.bits // 8,
            scales[0] + 2 * band.row if scales else None,
            wanted,
        )
        for band in found
    ]


def weight_sites(spec: Any) -> Iterator[tuple[str, list[Any]]]:
    """Name and protobuf values (data, then scale or table) of every weight, in the order of the program."""
    for operation in main_block(spec).operations:
        arguments = [a.value for key in sorted(operation.inputs) for a in operation.inputs[key].arguments]
        attributes = [operation.attributes[key] for key in sorted(operation.attributes)]
        values = [v for v in (*attributes, *arguments) if v.WhichOneof("value") == "blobFileValue"]
        if values:
            yield re.sub("_to_fp16(_quantized|_palettized)?$", "", operation.outputs[0].name), values


def extents(value: Any) -> list[int]:
    """The shape of a protobuf value."""
    return [dimension.constant.size for dimension in value.type.tensorType.dimensions]


def _kind_and_count(value: Any) -> tuple[int, int]:
    """Type of the blob for a protobuf value, and how many numbers it holds."""
    from coremltools.proto import MIL_pb2

    kinds = {getattr(MIL_pb2, name): getattr(blob, KINDS[name]) for name in KINDS}
    return kinds[value.type.tensorType.dataType], math.prod(extents(value))
