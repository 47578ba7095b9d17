"""A quantiser's results for a part's matrices, as a file: conversion uses them instead of rounding to nearest.

The file is a safetensors file. It may hold several forms of a matrix. For each matrix PATH and each FORM it has:

    PATH.FORM.codes   I8 [rows, columns]         an integer for each number: -128 to 127 for int8, -8 to 7 for int4.
    PATH.FORM.scale   F16 [rows]                 the factor for the integers of each row.
    PATH.FORM.codes   U8 [rows, columns]         for a palette instead: an index for each number.
    PATH.FORM.lut     F16 [tables, entries]      for a palette instead: its tables.

Conversion uses the form that a recipe gives to the matrix. The file may also hold fp16 values for any constant PATH of
the part, of any shape. They replace the checkpoint's values, for example if a quantiser folded a factor into the
constant. Constants that the file does not name are made from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardmill.checkpoint.headers import TensorInfo, read_header
from shardmill.convert.stream import PrequantizedWeight
from shardmill.errors import ShardmillError
from shardmill.forms.form import FP16, MATRIX, Shape, form, is_form
from shardmill.plan import Part

CODES, SCALE, LUT = "codes", "scale", "lut"
HALF = "F16"


class Codes:
    """A file of codes."""

    def __init__(self, file: Path, part: Part, forms: Mapping[str, str]) -> None:
        """Read the file's header.

        Args:
            file: the file.
            part: the part whose matrices the codes belong to.
            forms: the forms of the part's matrices, by path.

        Raises:
            ShardmillError: if the file does not fit the part or the forms.
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
            tensor = self.tensors.get(name)
            if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
                stored = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise ShardmillError(
                    f"{self.name}: {name} is {stored}, must be {dtype} {list(shape)}; make codes again"
                )
        if strange := [name for name in sorted(self.tensors.keys() - expected) if not self._is_of_another_form(name)]:
            raise ShardmillError(f"{self.name}: {strange[0]} belongs to nothing of {part.name}; make codes again")

    def names(self, path: str) -> bool:
        """Return whether the file has values or codes for a constant."""
        return path in self.tensors or f"{self._stem(path)}.{CODES}" in self.tensors

    def _stem(self, path: str) -> str:
        """Return the beginning of the names of a matrix's codes."""
        return f"{path}.{self.forms.get(path, FP16)}"

    def _is_of_another_form(self, name: str) -> bool:
        """Return whether a tensor belongs to a form that its matrix could have had."""
        stem, _, what = name.rpartition(".")
        path, _, other = stem.rpartition(".")
        return what in (CODES, SCALE, LUT) and path in self.forms and is_form(other) and other != self.forms[path]

    def contents(self, path: str, name: str, shape: Shape, places: list[int]) -> list[PrequantizedWeight]:
        """Return the contents of a constant's places; an empty list if the file does not name the constant.

        Args:
            path: the constant's path.
            name: the name of its form.
            shape: the constant's shape.
            places: where its numbers begin in the weight file, then where its scales or tables begin.
        """
        wanted = form(name if len(shape) == MATRIX else FP16)
        if path in self.tensors:
            if wanted.kind != "fp16":
                raise ShardmillError(f"{self.name}: {path} is stored in {name}; give codes, not values")
            return [PrequantizedWeight(self.tensors[path], self.folder, places[0], wanted.bits)]
        if not self.names(path):
            return []
        least, most = (-wanted.levels - 1, wanted.levels) if wanted.kind == "int" else (0, 2**wanted.bits - 1)
        beside = self.tensors[f"{self._stem(path)}.{SCALE if wanted.kind == 'int' else LUT}"]
        return [
            PrequantizedWeight(
                self.tensors[f"{self._stem(path)}.{CODES}"], self.folder, places[0], wanted.bits, least, most
            ),
            PrequantizedWeight(beside, self.folder, places[1], 16),
        ]

    def values(self, path: str) -> NDArray[np.float16] | NDArray[np.int8] | NDArray[np.uint8] | None:
        """Return a tensor of the file, memory-mapped; None if the file has no tensor of that name."""
        info = self.tensors.get(path)
        return None if info is None else mapped(info, self.folder)


def _expected(path: str, shape: Shape, name: str) -> dict[str, tuple[str, Shape]]:
    """Return the tensors of a matrix that has codes, with their types and shapes."""
    wanted = form(name)
    if wanted.kind == "palette":
        tables = wanted.tables(shape[0]), 2**wanted.bits
        return {f"{path}.{CODES}": ("U8", shape), f"{path}.{LUT}": (HALF, tables)}
    if wanted.kind == "int":
        return {f"{path}.{CODES}": ("I8", shape), f"{path}.{SCALE}": (HALF, shape[:1])}
    raise ShardmillError(f"{path}.{CODES}: the matrix is stored in {name}, which has no codes; give {path}")


def mapped(info: TensorInfo, folder: Path) -> NDArray[np.float16] | NDArray[np.int8] | NDArray[np.uint8]:
    """Return a tensor of a safetensors file."""
    dtype = {"I8": np.int8, "U8": np.uint8, HALF: np.float16}[info.dtype]
    if not prod(info.shape):
        return np.zeros(info.shape, dtype)
    return np.memmap(folder / info.file, dtype, "r", info.start, info.shape)
