"""A part's constants by the checkpoint's names, in fp32, from wherever their stored values come.

A tensor is in memory only while it is used, so a part of any size takes the memory of its largest one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardmill.errors import GateError
from shardmill.gates.naming import Weights
from shardmill.gates.stored import Stored, rows_at_once
from shardmill.models.architecture import Source
from shardmill.models.sources import MATRIX, put_back, undone
from shardmill.plan import Constant, Part


class HeldWeights(ABC):
    """The constants that hold a part's tensors."""

    def __init__(self, part: Part, name: str, prefix: str = "model.") -> None:
        """Keeps what they belong to.

        Args:
            part: whose they are.
            name: of what holds them, for errors.
            prefix: begins the checkpoint's names where transformers' begin with "model.".
        """
        self.part, self.name, self.prefix = part, name, prefix
        self._by_tensor: dict[str, list[Constant]] = {}  # by the tensor that they are made from
        self._divisors: dict[tuple[str, int | None], Constant] = {}  # by the matrix whose magnitude they hold
        self._blocks = Counter(tensor.path for tensor in part.tensors)  # of each constant, how many
        for tensor in part.tensors:
            if tensor.source.magnitude == "only":
                self._divisors.setdefault((tensor.source.tensor, tensor.source.index), tensor)
            else:
                self._by_tensor.setdefault(tensor.source.tensor, []).append(tensor)
        self.last: tuple[str, Tensor] | None = None  # experts that share a constant ask for it one after the other
        self.kept: tuple[str, Stored] | None = None

    @abstractmethod
    def stored(self, path: str) -> Stored:
        """A constant as it is stored. Raises GateError where there is none of that path."""

    def __call__(self, name: str) -> Tensor:
        """A checkpoint's tensor in fp32, as the stored constants would have it.

        Args:
            name: transformers' name of it.

        Raises:
            GateError: if it is not held.
        """
        made = self.made_of(name)
        if not made:
            raise GateError(f"{self.name} does not hold {name}")
        found = torch.zeros(made[0].source.shape or made[0].stored)
        self.fill(found, name)
        return found

    def made_of(self, name: str) -> list[Constant]:
        """The blocks that are made of a checkpoint's tensor, by transformers' name of it."""
        tensor = self.prefix + name.removeprefix("model.") if name.startswith("model.") else name
        return self._by_tensor.get(tensor, [])

    def fill(self, found: Tensor, name: str) -> None:
        """Writes what is held of a checkpoint's tensor to its place there: maybe only some experts."""
        for held in self.made_of(name):
            place = found if held.source.index is None else found[held.source.index]
            if held.rows and held.source.shape:  # the part's rows of a tensor that is read whole
                place = found[slice(*held.rows)]
            put_back(place, self.block(held), held.source, self.magnitude(held))

    def over(self, original: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """The checkpoint's tensors, `original`, with the held values wherever there are some."""

        def weights(name: str) -> Tensor:
            if not self.made_of(name):
                return original(name)
            found = original(name).float()  # mapped privately, if it is not a copy already
            self.fill(found, name)
            return found

        return weights

    def block(self, tensor: Constant) -> Tensor:
        """A block of a constant in fp32."""
        if self.last is None or self.last[0] != tensor.path:
            self.last = None  # one at a time
            self.last = tensor.path, self.values(tensor.path)
        values, (row, column) = self.last[1], tensor.at
        if len(tensor.shape) == 1:
            return values.flatten()[row : row + tensor.shape[0]]
        values = values.reshape(-1, values.shape[-1])
        return values[row : row + tensor.shape[0], column : column + tensor.shape[1]]

    def matrix_rows(self, name: str) -> Iterator[Tensor]:
        """The same as a call for a matrix, as blocks of rows, each maybe over the one before it.

        Where rows of constants are rows of the matrix, no more of it is made at a time; else it is made whole.
        """
        made = sorted(self.made_of(name), key=_first_row)
        ends = [0, *(_first_row(held) + held.shape[0] for held in made)]
        if not made or not all(map(_keeps_rows, made)) or [*map(_first_row, made), made[0].stored[0]] != ends:
            matrix = self(name)
            yield from torch.split(matrix, rows_at_once(matrix.shape[1]))
            return
        for held in made:
            (row, column), (count, width) = held.at, held.shape
            for rows in self._shared(held.path).rows(row, row + count):
                yield undone(rows[:, column : column + width], held.source)

    def _shared(self, path: str) -> Stored:
        """A constant as it is stored; one that holds several matrices is kept until another is asked for."""
        if self.kept is not None and self.kept[0] == path:
            return self.kept[1]
        self.kept = None  # one at a time
        found = self.stored(path)
        if self._blocks[path] > 1:
            self.kept = path, found
        return found

    def magnitude(self, tensor: Constant) -> float:
        """What a block was divided by, which another constant holds."""
        if not tensor.source.magnitude:
            return 1.0
        return float(self.block(self._divisors[tensor.source.tensor, tensor.source.index])[0])

    def values(self, path: str) -> Tensor:
        """A constant in fp32."""
        return self.stored(path).whole()

    def rows(self, path: str) -> Iterator[Tensor]:
        """The same, a block of rows at a time, each block over the one before it."""
        return self.stored(path).rows()


def _keeps_rows(tensor: Constant) -> bool:
    """Whether a block's rows are rows of its tensor, each number moved and multiplied at most."""
    source, pace = tensor.source, tensor.source.rows[2] if tensor.source.rows else 1
    plain = replace(source, tensor="", rows=None, add=0.0, times=1.0) == Source("")
    return plain and pace == 1 and tensor.rows is None and len(tensor.stored) == len(tensor.shape) == MATRIX


def _first_row(tensor: Constant) -> int:
    """Of its tensor, that a block is made of."""
    return tensor.source.rows[0] if tensor.source.rows else 0


def held_weights(all_held: Sequence[HeldWeights]) -> tuple[Weights, Iterator[Tensor]]:
    """Layer and norm weights of a whole model by transformers' names, and the LM head's rows in blocks."""
    owners: dict[str, list[HeldWeights]] = {}
    for one in all_held:
        for name in {transformers_name(tensor, one.prefix) for tensor in one.part.tensors}:
            owners.setdefault(name, []).append(one)
    heads = [one for one in all_held if one.part.kind == "head"]

    def weights(name: str) -> Tensor:
        if name == "lm_head.bias":
            return torch.cat([one(name) for one in heads])
        first, *others = owners[name]  # several, where a tensor has experts that lie in different programs
        found = first(name)
        for other in others:
            other.fill(found, name)
        return found

    return weights, (rows for one in heads for rows in one.rows("lm_head.weight"))


def transformers_name(tensor: Constant, prefix: str) -> str:
    """What transformers calls the parameter that a constant is made from."""
    name = tensor.source.tensor
    return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name
