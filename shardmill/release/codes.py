"""How many of the codes that quantisers chose come out otherwise when a calibrated build is built again.

Sums over a calibration text come out in other last digits on another kind of processor, and here and there a weight
then goes to the code beside. Hashes only say that something differs; this says how much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

FOLDER = "codes"
CODES = "codes"  # of a matrix; whatever else it has, scales or tables, stands beside them


@dataclass(frozen=True)
class Count:
    """How many numbers there are, and how many differ.

    Attributes:
        codes: of matrices.
        other_codes: of these, those that differ.
        beside: scales, and entries of tables.
        other_beside: of these, those that differ.
    """

    codes: int = 0
    other_codes: int = 0
    beside: int = 0
    other_beside: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, key) + getattr(other, key) for key in self.__dataclass_fields__))

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.other_codes and not self.other_beside

    def __str__(self) -> str:
        return (
            f"{self.other_codes:,} of {self.codes:,} codes and {self.other_beside:,} of {self.beside:,} scales differ"
        )


def code_lines(before: Path, after: Path, names: Iterable[str]) -> Iterator[str]:
    """What a person reads: the whole, then each matrix of which something differs.

    Args:
        before: a build's folder.
        after: that of the build of it.
        names: the steps of either, of which those of codes count.
    """
    files = sorted(f"{name}.safetensors" for name in names if name.startswith(f"{FOLDER}/"))
    if not files:
        return
    if absent := [file for file in files if not ((before / file).is_file() and (after / file).is_file())]:
        yield f"codes: {absent[0]} is not in both builds, so no codes were compared"
        return
    found = {
        f"{file.removesuffix('.safetensors')}: {matrix}": count
        for file in files
        for matrix, count in _by_matrix(before / file, after / file).items()
    }
    other = {name: count for name, count in found.items() if not count.same}
    where = f", in {len(other)} of {len(found)} matrices" if other else ""
    yield f"codes: {sum(found.values(), Count())}{where}"
    yield from (f"{name}: {count}" for name, count in other.items())


def _by_matrix(before: Path, after: Path) -> Mapping[str, Count]:
    """Counts by matrix and form; what only one file has differs throughout."""
    found: dict[str, Count] = {}
    with safe_open(before, framework="numpy") as one, safe_open(after, framework="numpy") as two:
        names = [{*file.keys()} for file in (one, two)]
        for name in sorted(names[0] | names[1]):
            held = [file.get_tensor(name) for file, own in zip((one, two), names, strict=True) if name in own]
            alike = len(held) == 2 and held[0].shape == held[1].shape
            size = max(values.size for values in held)
            other = int(np.count_nonzero(held[0] != held[1])) if alike else size
            matrix, _, what = name.rpartition(".")
            count = Count(size, other) if what == CODES else Count(0, 0, size, other)
            found[matrix] = found.get(matrix, Count()) + count
    return found
