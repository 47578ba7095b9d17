"""Loads a script of lab/ as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(name: str) -> ModuleType:
    """lab/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", Path(__file__).parents[1] / f"lab/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
