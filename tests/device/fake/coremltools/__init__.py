"""Takes the place of coremltools in tests of measure.py: models that answer what was recorded, and faults on demand.

It needs no torch, so that a process of it takes a fraction of a second. The protobuf classes are coremltools' own: the
rest of its path is looked at after this folder.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path

for entry in sys.path:
    other = Path(entry) / "coremltools"
    if other.is_dir() and other != Path(__file__).parent:
        __path__.append(str(other))


class ComputeUnit(enum.Enum):
    """As coremltools has it."""

    CPU_AND_NE = 1
    CPU_ONLY = 2


class ReshapeFrequency(enum.Enum):
    """As coremltools has it."""

    Frequent = 1
    Infrequent = 2


from coremltools import models  # noqa: E402,F401
