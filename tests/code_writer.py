"""Files of codes, which shardmill/convert/codes.py describes and reads, as a quantiser writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file


def write_codes(file: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Writes a file of codes, the same bytes for the same tensors. `tensors` are named as it says."""
    save_file({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}, file)
