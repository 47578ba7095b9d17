"""One file per Hugging Face `model_type`; `family` finds it."""

from __future__ import annotations

from types import ModuleType

from shardmill.errors import ConfigError

SUPPORTED = ("phi3",)


def type_fault(model_type: object) -> str:
    """Why a model_type can't be built, in words; empty if it can."""
    known = ", ".join(SUPPORTED)
    return "" if model_type in SUPPORTED else f"model_type {model_type!r} is not supported; supported: {known}"


def family(model_type: str) -> ModuleType:
    """The module that builds graphs for `model_type`. Raises ConfigError for one that is not supported."""
    unsupported = type_fault(model_type)
    if unsupported:
        raise ConfigError(unsupported)
    from importlib import import_module

    return import_module(f"shardmill.models.{model_type}")
