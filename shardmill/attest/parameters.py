"""What the user of a build chose, as a statement may say it: complete, and nothing of the user's machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import PurePath, PurePosixPath
from typing import Any

PATHS: tuple[tuple[str, ...], ...] = (  # keys of a config that name a file or a folder
    ("source", "path"),
    ("convert", "precision"),
    ("convert", "calibration", "text"),
    ("parity", "text"),
    ("benchmark", "text"),
    ("benchmark", "task_prompts"),
)


def parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The whole config without what is not set. Paths that lead out of the project are cut to their last name."""
    chosen = _without_unset(settings)
    for *sections, key in PATHS:
        held = reduce(lambda found, section: found.get(section) or {}, sections, chosen)  # `benchmark` may be false
        if key in held:
            held[key] = _public(held[key])
    return chosen


def _without_unset(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_unset(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value is not None
    }


def _public(path: str) -> str:
    pure = PurePosixPath(path)
    outside = pure.is_absolute() or PurePath(path).is_absolute() or ".." in pure.parts or path.startswith("~")
    return pure.name if outside else path
