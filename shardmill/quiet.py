"""Silences libraries' warnings, above all those of coremltools about what a machine without Core ML lacks.

They are true, but of no use to a person who runs a command: `shardmill doctor` says the same with what follows from it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_coremltools() -> Iterator[None]:
    """Inside, coremltools logs errors only."""
    with quiet("coremltools"):
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers logs errors only. It sets its level when it is imported: only it can change that."""
    from transformers.utils import logging as its_logging

    level = its_logging.get_verbosity()
    its_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        its_logging.set_verbosity(level)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Inside, the logger `name` logs errors only."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet_process() -> Iterator[None]:
    """Show nothing that this process prints inside the `with` block, native code included."""
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout.flush(), sys.stderr.flush()
        for stream, _ in kept:
            os.dup2(sink, stream)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(sink)
