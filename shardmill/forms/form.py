"""The forms in which a matrix can be stored, by their names in a recipe.

fp16         the numbers, rounded to fp16.
int8, int4   symmetric integers, one fp16 scale for each output channel.
paletteN     N bits (4, 6 or 8) that choose from a table of 2^N fp16 numbers, one table for the matrix.
paletteN/G   as paletteN, with one table for each G output channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardmill.errors import ConfigError

Shape = tuple[int, ...]
FP16, INT8, INT4 = "fp16", "int8", "int4"
NAMES = "fp16, int8, int4, palette4, palette6, palette8, or a palette for each G output channels: palette4/G"
MATRIX = 2  # axes of a constant that has a form; every other constant is fp16
_NAME = re.compile(r"fp16|int[48]|palette([468])(?:/([1-9][0-9]{0,8}))?")
_HALF = 2  # bytes of an fp16 number


@dataclass(frozen=True)
class Form:
    """The parts of a form's name.

    Attributes:
        kind: "fp16", "int" or "palette".
        bits: bits of each number.
        group: output channels that share a table; 0 if all channels share it, or the form has no table.
    """

    kind: str
    bits: int
    group: int = 0

    @property
    def levels(self) -> int:
        """Return the largest magnitude of a symmetric integer's code: 7 of int4, 127 of int8."""
        return (1 << self.bits - 1) - 1

    def tables(self, rows: int) -> int:
        """Return how many tables a palette of `rows` output channels has."""
        return rows // self.group if self.group else 1

    def blobs(self, shape: Shape) -> list[int]:
        """Return the stored bytes of a matrix: for its numbers, then for its scales or tables."""
        data = -(-prod(shape) * self.bits // 8)
        if self.kind == "fp16":
            return [data]
        beside = shape[0] if self.kind == "int" else self.tables(shape[0]) * 2**self.bits
        return [data, _HALF * beside]


@lru_cache(maxsize=64)
def form(name: str) -> Form:
    """Return the form of a name. Raises ConfigError if the name is unknown."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name}: no form of a matrix; there are {NAMES}")
    if match[1]:
        return Form("palette", int(match[1]), int(match[2] or 0))
    return Form("fp16", 16) if name == FP16 else Form("int", int(name[3:]))


def is_form(name: str) -> bool:
    """Return whether there is a form of that name."""
    return _NAME.fullmatch(name) is not None


def misfit(name: str, shape: Shape) -> str:
    """Return why a matrix can't be stored in a form; empty if it can."""
    group = form(name).group
    if group and shape[0] % group:
        return f"{name}: its {shape[0]} output channels do not divide into groups of {group}"
    return ""


def stored_bytes(name: str, shape: Shape) -> int:
    """Return bytes of a constant, whose form counts if it is a matrix; padding in the weight file left out."""
    return sum(form(name if len(shape) == MATRIX else FP16).blobs(shape))


def matrices(constants: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the constants of a program that have a form."""
    return {path: shape for path, shape in constants.items() if len(shape) == MATRIX}


def spread(forms: str | Mapping[str, str], constants: Mapping[str, Shape]) -> dict[str, str]:
    """Return the form of each matrix among a program's constants, where one name may stand for all."""
    paths = matrices(constants)
    return dict.fromkeys(paths, forms) if isinstance(forms, str) else {path: forms[path] for path in paths}
