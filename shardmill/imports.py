"""Keeps libraries from importing and printing what shardmill does not need.

coremltools imports its trainers of PyTorch models, and with them PyTorch's distributed package, though no conversion
needs them. It also imports transformers to learn whether it is installed. Both imports take a third of the
start time of a process. The warnings of coremltools name features that a machine without Core ML lacks, as `shardmill
doctor` explains.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


@contextmanager
def quiet_coremltools() -> Iterator[None]:
    """Let coremltools log errors only, inside the `with` block."""
    with quiet("coremltools"):
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers log errors only, inside the `with` block; only its own function changes its log level."""
    from transformers.utils import logging as its_logging

    level = its_logging.get_verbosity()
    its_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        its_logging.set_verbosity(level)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Let the logger `name` log errors only, inside the `with` block."""
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
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, _ in kept:
            os.dup2(sink, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(sink)


ASKING = "coremltools._deps"  # looks for the libraries that coremltools may use, and notes which are installed
LOOKED_FOR = "transformers"
TRAINERS_TOO = "_IMPORT_CT_OPTIMIZE_TORCH"  # the flag in ASKING that makes coremltools import its trainers, too


class _WithoutTrainers(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        hides = LOOKED_FOR not in sys.modules
        if hides:
            sys.modules[LOOKED_FOR] = None  # type: ignore[assignment]  # makes an import fail
        try:
            super().exec_module(module)
        finally:
            if hides:
                del sys.modules[LOOKED_FOR]
        setattr(module, TRAINERS_TOO, False)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == ASKING else None
        if spec and spec.origin:
            spec.loader = _WithoutTrainers(name, spec.origin)
        return spec


def spare_coremltools() -> None:
    """Let this process import only the needed parts of coremltools, unless coremltools is imported already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
