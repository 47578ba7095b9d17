"""A constant as a package stores it, expanded to fp32 a block of rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardmill.errors import GateError
from shardmill.forms.form import Form
from shardmill.models.architecture import TensorSource, name_in_tower, name_under
from shardmill.models.sources import MATRIX, put_back, undone
from shardmill.plan import Constant, Part

FP16_STEP = 2**-24  # between neighbouring fp16 numbers near 0
BLOCK = 1_000_000  # numbers of a matrix in fp32 at a time: 4 MB, which a product finds in the processor's cache


def rows_at_once(columns: int) -> int:
    """Return how many rows of a matrix make a block of BLOCK numbers; at least one."""
    return max(1, BLOCK // columns)


@dataclass(frozen=True)
class Stored:
    """A constant's stored numbers: fp16 values, or codes with their scales or palettes.

    Attributes:
        values: fp16, or codes of a matrix [out, in]: integers to be scaled, or indices into tables.
        scale: the quantisation step of each output channel, [out, 1].
        tables: a palette's tables, [tables, entries], each for the same number of output channels.
    """

    values: Tensor
    scale: Tensor | None = None
    tables: Tensor | None = None

    def has_form(self, form: Form) -> bool:
        """Return whether the constant is stored as a form requires: fp16, codes with scales, or indices into tables."""
        if form.kind == "palette":
            shape = (form.tables(len(self.values)), 2**form.bits)
            return self.tables is not None and tuple(self.tables.shape) == shape
        return self.tables is None and (self.scale is not None) == (form.kind == "int")

    @property
    def coded(self) -> bool:
        """Return whether the values are codes."""
        return self.scale is not None or self.tables is not None

    def whole(self) -> Tensor:
        """Return the whole constant in fp32."""
        if not self.coded:
            return self.values.float()
        whole = torch.empty(self.values.shape)
        first = 0
        for rows in self.rows():
            whole[first : first + len(rows)] = rows
            first += len(rows)
        return whole

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """Yield rows [start, stop) in fp32, a block at a time; the product with the scale is not rounded again.

        Each block overwrites the one before it: allocating new memory for each would fragment the heap.
        """
        stop, count = len(self.values) if stop is None else stop, rows_at_once(math.prod(self.values.shape[1:]))
        scratch = torch.empty(self.values[:count].shape)
        for first in range(start, stop, count):
            block = self.values[first : min(first + count, stop)]
            rows = scratch[: len(block)]
            if self.tables is not None:
                rows.copy_(self._tables(first, len(block)).gather(1, block.long()))
            else:
                rows.copy_(block)
            yield rows if self.scale is None else rows.mul_(self.scale[first : first + len(block)])

    def steps(self, expected: Tensor, first: int) -> Tensor:
        """Return the quantisation step at each expected number; rounding to nearest is off by half a step at most.

        A palette's step is the gap between the two nearest entries; for a number beyond the table, the sum of the
        distances to both entries. No step is below fp16's smallest: a channel of only zeros has a scale of 0.

        Args:
            expected: the original rows of the constant, in fp32.
            first: the index, in the constant, of the first of these rows.
        """
        if self.scale is not None:
            return self.scale[first : first + len(expected)].clamp(min=FP16_STEP)
        if self.tables is None:
            return fp16_step(expected)
        return torch.stack([_gap(*pair) for pair in zip(expected, self._tables(first, len(expected)), strict=True)])

    def _tables(self, first: int, count: int) -> Tensor:
        """Return the table of each row, [count, entries], in fp32."""
        assert self.tables is not None
        share = len(self.values) // len(self.tables)
        return self.tables[torch.arange(first, first + count) // share].float()


def _gap(row: Tensor, table: Tensor) -> Tensor:
    """Return the sum of the distances of each number of a row to the two nearest of a table's entries."""
    entries = torch.unique_consecutive(table.sort().values)
    if len(entries) == 1:
        return torch.clamp((row - entries).abs() * 2, min=FP16_STEP)
    right = torch.searchsorted(entries, row).clamp(1, len(entries) - 1)
    return torch.clamp((row - entries[right - 1]).abs() + (entries[right] - row).abs(), min=FP16_STEP)


def fp16_step(values: Tensor) -> Tensor:
    """Return an upper bound of the distance between neighbouring fp16 numbers at each value."""
    return (values.abs() * 2**-10).clamp(min=FP16_STEP)


class StoredWeights(ABC):
    """The constants that contain a part's tensors."""

    def __init__(self, part: Part, name: str, prefix: str = "model.") -> None:
        """Store the arguments and index the part's tensors.

        Args:
            part: the part that the constants belong to.
            name: name of the package or file that contains the constants, for error messages.
            prefix: begins the checkpoint's names where transformers' begin with "model.".
        """
        self.part, self.name, self.prefix = part, name, prefix
        self._by_tensor: dict[str, list[Constant]] = {}  # by the checkpoint tensor that they are made from
        self._divisors: dict[tuple[str, int | None], Constant] = {}  # by the matrix whose magnitude they contain
        self._blocks = Counter(tensor.path for tensor in part.tensors)  # number of blocks in each constant
        for tensor in part.tensors:
            if tensor.source.magnitude == "only":
                self._divisors.setdefault((tensor.source.tensor, tensor.source.index), tensor)
            else:
                self._by_tensor.setdefault(tensor.source.tensor, []).append(tensor)
        self.last: tuple[str, Tensor] | None = None  # experts that share a constant request it one after the other
        self.kept: tuple[str, Stored] | None = None

    @abstractmethod
    def stored(self, path: str) -> Stored:
        """Return a constant as it is stored. Raises GateError if no constant has that path."""

    def __call__(self, name: str) -> Tensor:
        """Return a checkpoint's tensor in fp32, rebuilt from the stored constants.

        Args:
            name: transformers' name for the tensor.

        Raises:
            GateError: if no constant contains the tensor.
        """
        made = self.made_of(name)
        if not made:
            raise GateError(f"{self.name} does not hold {name}")
        tensor = torch.zeros(made[0].source.shape or made[0].stored)
        self.fill(tensor, name)
        return tensor

    def made_of(self, name: str) -> list[Constant]:
        """Return the blocks that are made from a checkpoint's tensor, given transformers' name for it."""
        return self._by_tensor.get(name_under(self.prefix, name), [])

    def fill(self, tensor: Tensor, name: str) -> None:
        """Write the stored blocks of a checkpoint's tensor into `tensor`; they may cover only some experts."""
        for constant in self.made_of(name):
            place = tensor if constant.source.index is None else tensor[constant.source.index]
            if constant.rows and constant.source.shape:  # the part's rows of a tensor that is read whole
                place = tensor[slice(*constant.rows)]
            put_back(place, self.block(constant), constant.source, self.magnitude(constant))

    def over(self, original: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """Return a lookup of the checkpoint's tensors (`original`) in which stored values replace the original ones."""

        def weights(name: str) -> Tensor:
            if not self.made_of(name):
                return original(name)
            tensor = original(name).float()  # mapped privately, unless it is a copy already
            self.fill(tensor, name)
            return tensor

        return weights

    def block(self, tensor: Constant) -> Tensor:
        """Return a block of a constant in fp32."""
        if self.last is None or self.last[0] != tensor.path:
            self.last = None  # only one constant in memory
            self.last = tensor.path, self.values(tensor.path)
        values, (row, column) = self.last[1], tensor.at
        if len(tensor.shape) == 1:
            return values.flatten()[row : row + tensor.shape[0]]
        values = values.reshape(-1, values.shape[-1])
        return values[row : row + tensor.shape[0], column : column + tensor.shape[1]]

    def matrix_rows(self, name: str) -> Iterator[Tensor]:
        """Yield a matrix in fp32 as blocks of rows; a block may overwrite the one before it.

        If rows of constants are rows of the matrix, only one block is in memory at a time; otherwise the whole matrix
        is.
        """
        made = sorted(self.made_of(name), key=_first_row)
        ends = [0, *(_first_row(constant) + constant.shape[0] for constant in made)]
        if not made or not all(map(_keeps_rows, made)) or [*map(_first_row, made), made[0].stored[0]] != ends:
            matrix = self(name)
            yield from torch.split(matrix, rows_at_once(matrix.shape[1]))
            return
        for constant in made:
            (row, column), (count, width) = constant.at, constant.shape
            for rows in self._shared(constant.path).rows(row, row + count):
                yield undone(rows[:, column : column + width], constant.source)

    def _shared(self, path: str) -> Stored:
        """Return a constant as it is stored; one with several matrices is cached until another one is requested."""
        if self.kept is not None and self.kept[0] == path:
            return self.kept[1]
        self.kept = None  # only one constant in memory
        constant = self.stored(path)
        if self._blocks[path] > 1:
            self.kept = path, constant
        return constant

    def magnitude(self, tensor: Constant) -> float:
        """Return the divisor that was applied to a block; another constant contains it."""
        if not tensor.source.magnitude:
            return 1.0
        return float(self.block(self._divisors[tensor.source.tensor, tensor.source.index])[0])

    def values(self, path: str) -> Tensor:
        """Return a constant in fp32."""
        return self.stored(path).whole()

    def rows(self, path: str) -> Iterator[Tensor]:
        """Yield a constant in fp32 as blocks of rows; each block overwrites the one before it."""
        return self.stored(path).rows()


def _keeps_rows(tensor: Constant) -> bool:
    """Return whether a block's rows are rows of its tensor, with each number at most multiplied and moved."""
    source, pace = tensor.source, tensor.source.rows[2] if tensor.source.rows else 1
    plain = replace(source, tensor="", rows=None, add=0.0, times=1.0) == TensorSource("")
    return plain and pace == 1 and tensor.rows is None and len(tensor.stored) == len(tensor.shape) == MATRIX


def _first_row(tensor: Constant) -> int:
    """Return the first row of a block in its tensor."""
    return tensor.source.rows[0] if tensor.source.rows else 0


class WholeModel:
    """The weights of a model whose layers and LM head are in several programs, but for its embedding table."""

    def __init__(self, every: Sequence[StoredWeights], beside: Mapping[str, Tensor] | None = None) -> None:
        """Index the tensors of all programs.

        Args:
            every: the constants of each program.
            beside: tensors that no program contains, by the name under which they are asked for.
        """
        self.every, self.beside = every, beside or {}
        self._owners: dict[str, list[StoredWeights]] = {}  # several if a tensor's experts are in different programs
        for one in every:
            for name in {tensor.source.tensor for tensor in one.part.tensors}:
                self._owners.setdefault(name, []).append(one)
        self._heads = [one for one in every if one.part.kind == "head"]

    def __call__(self, name: str) -> Tensor:
        """Return a layer's or norm's tensor in fp32, given transformers' name for it or the checkpoint's."""
        if name in self.beside:
            return self.beside[name]
        if name == "lm_head.bias":
            return torch.cat([one(name) for one in self._heads])
        first, *others = self._owners[name_under(self.every[0].prefix, name)]
        tensor = first(name)
        for other in others:
            other.fill(tensor, name)
        return tensor

    def matrix_rows(self, name: str) -> Iterator[Tensor]:
        """Yield a matrix in fp32 as blocks of rows; a block may overwrite the one before it."""
        owners = self._owners.get(name_under(self.every[0].prefix, name), [])
        if name in self.beside or len(owners) != 1:
            matrix = self(name)
            yield from torch.split(matrix, rows_at_once(matrix.shape[1]))
        else:
            yield from owners[0].matrix_rows(name)

    def head(self) -> Iterator[Tensor]:
        """Yield the LM head's rows in fp32, in blocks; a block overwrites the one before it."""
        return (rows for one in self._heads for rows in one.rows("lm_head.weight"))


def transformers_name(tensor: Constant, prefix: str) -> str:
    """Return transformers' name for the parameter in a constant."""
    return name_in_tower(prefix, tensor.source.tensor)
