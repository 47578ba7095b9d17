"""coremltools without its remarks on import: what a machine without Core ML lacks, versions it was not tested with.

They are true and of no use to a person who runs a command: `shardmill doctor` says the same in terms of what follows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_coremltools() -> Iterator[None]:
    """Inside, coremltools logs errors only."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
