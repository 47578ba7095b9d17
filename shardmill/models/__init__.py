"""What models compute: one file a family in `families/`, found by its name, which is the config's `model_type`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from shardmill.errors import ConfigError

FAMILIES = Path(__file__).parent / "families"


@cache
def supported() -> tuple[str, ...]:
    """Every model_type that builds, sorted."""
    return tuple(sorted(file.stem for file in FAMILIES.glob("[!_]*.py")))


def type_fault(model_type: object) -> str:
    """Says why a model_type can't be built, or returns ''."""
    if model_type in supported():
        return ""
    return f"model_type {model_type!r} is not supported; supported: {', '.join(supported())}"


def family(model_type: str) -> ModuleType:
    """The module that describes models of `model_type`: its `describe(config, context)` returns a Model.

    Raises:
        ConfigError: for a model_type that is not supported.
    """
    fault = type_fault(model_type)
    if fault:
        raise ConfigError(fault)
    return import_module(f"shardmill.models.families.{model_type}")
