"""One file per Hugging Face `model_type`; `family` finds it."""

from __future__ import annotations

from types import ModuleType

from shardmill.errors import ConfigError

SUPPORTED = ("phi3",)


def family(model_type: str) -> ModuleType:
    """The module that builds graphs for `model_type`. Raises ConfigError for one that is not supported."""
    if model_type not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {known}")
    from importlib import import_module

    return import_module(f"shardmill.models.{model_type}")
