"""Spares a process what coremltools imports for its own sake: a third of the seconds that it takes to start.

coremltools imports its trainers of PyTorch models, and with them PyTorch's distributed package, though no conversion
needs them; whoever does imports them by name. And it imports transformers to know whether it is there, though only its
tests ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

ASKING = "coremltools._deps"  # looks for the libraries that coremltools may use, and notes which there are
LOOKED_FOR = "transformers"
TRAINERS_TOO = "_IMPORT_CT_OPTIMIZE_TORCH"  # what ASKING notes of them: import them with all else


class _WithoutTrainers(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        hides = LOOKED_FOR not in sys.modules
        if hides:
            sys.modules[LOOKED_FOR] = None  # type: ignore[assignment]  # which fails an import
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
    """From now on this process imports of coremltools what it needs, unless it was imported before."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
