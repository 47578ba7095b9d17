"""What a judgement is asked for: systems, bounds, domains of inputs; on a command line or in a file of limits.

A file of limits is TOML. Its keys are the names of the options:

    system = ["macOS 26", "macOS 27"]
    chip = 4
    off = 0.05
    error = 0.01
    difference = 0.0001
    precision = "fp16"
    accept = ["T1"]

    [range]
    audio = [-1, 1]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_coreml.errors import InputError
from portable_coreml.files.model import read_utf8
from portable_coreml.judge.feed import Range
from portable_coreml.judge.rule import Target


@dataclass(frozen=True)
class Asked:
    """What a judgement is asked for.

    Attributes:
        target: the chip and the systems.
        off: the share of a program's arithmetic or bytes that may leave the Neural Engine before that is an error.
        error: the error of an output in fp16 that is allowed, relative to its size.
        difference: the difference of two programs' values that is allowed, in the same way.
        ranges: the domains of inputs, by name.
        accept: rules whose findings are no errors.
        precision: "fp16", or "ane" with its options.
        runs: whether the program is run; otherwise it is judged by rules alone.
        inputs: a file of arrays to run it with.
        against: what it is compared with.
        function: the function to judge; all if empty.
        seed: of the random numbers in inputs.
    """

    target: Target = field(default_factory=Target)
    off: float = 0.05
    error: float = 0.01
    difference: float = 0.0001
    ranges: Mapping[str, Range] = field(default_factory=dict)
    accept: tuple[str, ...] = ()
    precision: str = "fp16"
    runs: bool = True
    inputs: Path | None = None
    against: Path | None = None
    function: str = ""
    seed: int = 0


KEYS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "system": ("a list of names", list),
    "chip": ("a number", int),
    "ios": ("true or false", bool),
    "off": ("a number", (int, float)),
    "error": ("a number", (int, float)),
    "difference": ("a number", (int, float)),
    "precision": ("a text", str),
    "accept": ("a list of rules", list),
    "range": ("a table of pairs of numbers", dict),
}


def read_limits(path: Path) -> dict[str, Any]:
    """Return the keys of a file of limits, ranges as pairs of numbers. Raises InputError, naming file and key."""
    try:
        content = tomllib.loads(read_utf8(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    for key, value in content.items():
        if key not in KEYS:
            raise InputError(f"{path}: there is no key '{key}'; there are {', '.join(KEYS)}")
        words, kind = KEYS[key]
        listed = isinstance(value, list) and not all(isinstance(item, str) for item in value)
        if not isinstance(value, kind) or listed or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"{path}: '{key}' must be {words}")
    for name, pair in content.get("range", {}).items():
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) in (int, float) for n in pair):
            raise InputError(f"{path}: the range of '{name}' must be two numbers, [least, largest]")
        content["range"][name] = (float(pair[0]), float(pair[1]))
    return content


def range_of(text: str) -> tuple[str, Range]:
    """Return the name and the range of NAME=LEAST:LARGEST. Raises ValueError for another text."""
    name, _, numbers = text.rpartition("=")
    low, _, high = numbers.partition(":")
    if not name or not high or not float(low) <= float(high):
        raise ValueError(f"{text!r} is not NAME=LEAST:LARGEST")
    return name, (float(low), float(high))
