"""The models' arithmetic: one file for each family, named after the config's `model_type`.

Decoders lie in `families/`, encoders in `encoders/`. A model_type may be in both: the config decides whether a
checkpoint is built as a decoder or as an encoder.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from shardmill.errors import ConfigError

DECODER, ENCODER = "decoder", "encoder"
FOLDERS = {DECODER: "families", ENCODER: "encoders"}
REMEDIES = {  # for a config that takes one kind for the other
    DECODER: "a decoder: give `context`, its key/value slots, in place of `buckets`",
    ENCODER: "an encoder: give `buckets` (auto chooses them) in place of `context`",
}


@cache
def supported(kind: str = DECODER) -> tuple[str, ...]:
    """Return every model_type that builds as this kind of model, sorted."""
    return tuple(sorted(file.stem for file in (Path(__file__).parent / FOLDERS[kind]).glob("[!_]*.py")))


def family_modules(model_type: str) -> tuple[str, ...]:
    """Return the dotted names of the modules that describe models of `model_type`."""
    return tuple(
        f"{__name__}.{folder}.{model_type}" for kind, folder in FOLDERS.items() if model_type in supported(kind)
    )


def type_fault(model_type: object, kind: str | None = None) -> str:
    """Return why a model_type can't be built, as this kind of model or as any kind, or return ''."""
    kinds = (kind,) if kind else tuple(FOLDERS)
    every = sorted({name for each in kinds for name in supported(each)})
    if model_type in every:
        return ""
    for other, remedy in REMEDIES.items():
        if model_type in supported(other):
            return f"model_type {model_type!r} is {remedy}"
    return f"model_type {model_type!r} is not supported; supported: {', '.join(every)}"


def family(model_type: str, kind: str = DECODER) -> ModuleType:
    """Return the module that describes models of `model_type`: its `describe(config, length)` returns its description.

    Raises:
        ConfigError: for a model_type that is not supported.
    """
    fault = type_fault(model_type, kind)
    if fault:
        raise ConfigError(fault)
    return import_module(f"{__name__}.{FOLDERS[kind]}.{model_type}")
