"""Data that differ in one leaf from other data: a setting, an entry of a file."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from shardmill import config

# Values of settings that have none and are no number.
WITHOUT = {"buckets": (7,), "budget": config.Budget(perplexity=1.1), "runs_on": ("macOS 26", "macOS 27")}
Leaf = tuple[Any, ...]  # the names and indices that lead to it


def leaves(value: Any, depth: int = 99, path: Leaf = ()) -> Iterator[Leaf]:
    """Yield the path of every leaf, or of what lies `depth` names deep. The first record of a list stands for all."""
    inner: dict[Any, Any] = {}
    if is_dataclass(value):
        inner = {each.name: getattr(value, each.name) for each in fields(value)}
    elif isinstance(value, dict):
        inner = value
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        inner = {0: value[0]}
    if not inner or depth == 0:
        yield path
    for name, each in inner.items() if depth else ():
        yield from leaves(each, depth - 1, (*path, name))


def changed(value: Any, path: Leaf, leaf: Any = None) -> Any:
    """Return the same data with another value of the same kind in the place of a leaf, or with `leaf` there."""
    if not path:
        return _other(value) if leaf is None else leaf
    made, first = copy(value), path[0]
    if is_dataclass(value):
        object.__setattr__(made, first, changed(getattr(value, first), path[1:], leaf))
    else:
        made[first] = changed(value[first], path[1:], leaf)
    return made


def _other(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list | tuple):
        return type(value)((*value, value[-1] if value else 7))
    if isinstance(value, dict):
        return {**value, "another": 7}
    return 7 if value is None else value * 2 or 7
