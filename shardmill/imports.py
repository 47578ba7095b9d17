"""Keeps libraries from importing and printing what shardmill does not need.

coremltools imports its trainers of PyTorch models, and with them PyTorch's distributed package, though no conversion
needs them. It also imports transformers and scipy to learn whether they are installed. The trainers and transformers
take a third of the start time of a process. transformers imports accelerate and scipy where they are installed, for
work that is not done here: a quarter of the time that its models take to be imported. The warnings of coremltools name
features that a machine without Core ML lacks, as `shardmill doctor` explains.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from shardmill.errors import ShardmillError


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
def needing_lab() -> Iterator[None]:
    """Import parts of the lab inside the `with` block, which no other code of shardmill does.

    Raises:
        ShardmillError: the lab, or what it needs, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ShardmillError(
            f"this command needs {error.name}, which is not installed: shardmill's wheel brings it, and so does "
            "`pip install -c constraints.txt -e .` in a clone"
        ) from error


@contextmanager
def quiet_process() -> Iterator[None]:
    """Show nothing that this process prints inside the `with` block, native code included."""
    copies = [(stream, os.dup(stream)) for stream in (1, 2)]
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, _ in copies:
            os.dup2(sink, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in copies:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(sink)


ASKING = "coremltools._deps"  # looks for the libraries that coremltools may use, and notes which are installed
TRAINERS_TOO = "_IMPORT_CT_OPTIMIZE_TORCH"  # the flag in ASKING that makes coremltools import its trainers, too
HIDDEN: dict[str, tuple[str, ...]] = {
    ASKING: ("transformers", "scipy"),
    "transformers": ("accelerate", "scipy"),
}  # module -> what it must not find


def _leave_out_trainers(module: ModuleType) -> None:
    setattr(module, TRAINERS_TOO, False)


def _ask_now(module: ModuleType) -> None:
    """Have transformers look for the hidden libraries: it asks again before each use, but keeps the first answer."""
    from transformers.utils import is_accelerate_available, is_scipy_available  # type: ignore[attr-defined]

    is_accelerate_available()
    is_scipy_available()


AFTERWARDS = {ASKING: _leave_out_trainers, "transformers": _ask_now}  # module -> what is done while they are hidden


class _Sparing(SourceFileLoader):
    """A loader of a module that finds some libraries missing; they are there again when it is loaded."""

    def __init__(self, name: str, path: str, hidden: Iterable[str]) -> None:
        super().__init__(name, path)
        self.hidden = hidden

    def exec_module(self, module: ModuleType) -> None:
        hidden = [name for name in self.hidden if name not in sys.modules]
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
        try:
            super().exec_module(module)
            AFTERWARDS[self.name](module)
        finally:
            for name in hidden:
                del sys.modules[name]


class _Finder(MetaPathFinder):
    def __init__(self, hidden: Mapping[str, Iterable[str]]) -> None:
        self.hidden = hidden

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in self.hidden else None
        if spec and spec.origin:
            spec.loader = _Sparing(name, spec.origin, self.hidden[name])
        return spec


def spare_imports(torch: bool = False) -> None:
    """Let coremltools and transformers import only what is needed in this process, unless they are imported already.

    Args:
        torch: whether coremltools is spared PyTorch, too, which takes longer than all the rest. It can't convert then.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        more = {ASKING: (*HIDDEN[ASKING], "torch")} if torch else {}
        sys.meta_path.insert(0, _Finder(HIDDEN | more))
