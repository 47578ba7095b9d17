"""The intermediate representation.

An ML Program as immutable data, the same whether it was read from a package's protobuf or from a compiled bundle's
text.

Nothing is interpreted here. Weights stay in their file (`Blob`) until they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class TensorType:
    """A scalar type's name and a shape, where None is an unknown extent. If `variadic`, even the rank is unknown."""

    dtype: str
    shape: tuple[int | None, ...] = ()
    variadic: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if n is None else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class StateType:
    """A tensor that outlives one prediction."""

    wrapped: TensorType


@dataclass(frozen=True)
class ListType:
    """`length` elements of one type; None if the length is not known."""

    element: Type
    length: int | None = None


@dataclass(frozen=True)
class DictType:
    """The type of a dictionary."""

    key: Type
    value: Type


@dataclass(frozen=True)
class TupleType:
    """The type of a tuple."""

    elements: tuple[Type, ...]


Type = TensorType | StateType | ListType | DictType | TupleType


@dataclass(frozen=True)
class Blob:
    """A tensor in a weight file.

    Path as the program has it (`@model_path/weights/weight.bin`), offset of its record.
    """

    path: str
    offset: int


@dataclass(frozen=True, eq=False)
class Value:
    """A literal.

    `data` is an array or a Blob (tensors), a tuple of Values (lists, tuples), or Pairs (dictionaries).
    """

    type: Type
    data: np.ndarray | Blob | tuple[Value, ...] | Pairs


@dataclass(frozen=True, eq=False)
class Pairs:
    """The entries of a dictionary literal, in order."""

    items: tuple[tuple[Value, Value], ...]


Binding = str | Value  # the binding of an argument: the name of an earlier value, or a literal


@dataclass(frozen=True)
class Named:
    """A name with its type: parameters, block inputs, operation outputs."""

    name: str
    type: Type


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. An argument is one binding or, for a list argument such as concat's values, several."""

    kind: str
    inputs: Mapping[str, tuple[Binding, ...]]
    outputs: tuple[Named, ...]
    attributes: Mapping[str, Value] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()

    @property
    def name(self) -> str:
        """Return the operation's name, which coremltools keeps apart from its outputs', or its first output's."""
        label = self.attributes.get("name")
        if label is not None and isinstance(label.data, np.ndarray):
            return str(label.data[()])
        return self.outputs[0].name if self.outputs else self.kind


@dataclass(frozen=True, eq=False)
class Block:
    """Operations in order, and the names of the block's outputs."""

    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    inputs: tuple[Named, ...] = ()

    def walk(self) -> Iterator[Op]:
        """Yield every operation, nested blocks included, in program order."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


@dataclass(frozen=True, eq=False)
class Function:
    """A function of a program: its inputs and a block for each operation set."""

    name: str
    inputs: tuple[Named, ...]
    opset: str
    block: Block
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Program:
    """An ML Program: functions by name, and attributes."""

    functions: Mapping[str, Function]
    attributes: Mapping[str, Value] = field(default_factory=dict)
    version: str = "1"


def blobs(function: Function) -> Iterator[Blob]:
    """Yield every reference into a weight file."""
    for op in function.block.walk():
        for value in [*op.attributes.values(), *(b for bound in op.inputs.values() for b in bound)]:
            if isinstance(value, Value) and isinstance(value.data, Blob):
                yield value.data
