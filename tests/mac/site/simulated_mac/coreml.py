"""Where coremltools finds its native module: in native/, as if it lay among coremltools' own files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Finder:
    """Find coremltools where Python would, and adds the folder of the native module to it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "coremltools":
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.submodule_search_locations is not None:
            found.submodule_search_locations.append(self.folder)
        return found


def offer() -> None:
    """Let coremltools have a native module."""
    sys.meta_path.insert(0, Finder(os.path.join(os.environ["SIMULATED_MAC"], "native")))
