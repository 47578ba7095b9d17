"""The host's tables: rows of fp16, or of int8 with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill import files
from shardmill.errors import ShardmillError
from shardmill.models.host import Floats

EMBEDDING, SCALE = "embedding", ".scale"


@dataclass(frozen=True)
class Table:
    """A table, memory-mapped from its file; looked-up rows are float32.

    Attributes:
        values: [rows, d] in fp16 or int8.
        scale: for values in int8, the scale of each row, [rows] in fp16.
    """

    values: NDArray[Any]
    scale: NDArray[np.float16] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of rows and of columns."""
        return self.values.shape

    def __getitem__(self, rows: Any) -> Floats:
        """Return some rows, indexed as in numpy: [n, d]."""
        found: Floats = self.values[rows].astype(np.float32)
        return found if self.scale is None else found * self.scale[rows].astype(np.float32)[..., None]


def read_tables(file: Path) -> dict[str, Table]:
    """Return the host's tables by name. Raises ShardmillError if the file has no table `embedding`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # maps the file; safetensors.numpy would read it all

    try:
        files.check(file)
        found = {name: tensor.numpy() for name, tensor in load_file(file).items()}
        if EMBEDDING not in found:
            raise KeyError(f"it contains no tensor '{EMBEDDING}'")
    except (OSError, SafetensorError, KeyError) as error:
        raise ShardmillError(f"{file} can't be read as the embedding table: {error}; build again") from error
    return {n: Table(values, found.get(n + SCALE)) for n, values in found.items() if not n.endswith(SCALE)}
