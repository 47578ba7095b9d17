"""Turns what pydantic finds wrong with settings into one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

# What pydantic calls the alternatives of a key that takes a value or a word, in the place of an error.
GIVEN, NAMED = "(given)", "(named)"


def describe_all(error: ValidationError) -> str:
    """What is wrong with each key, without what only follows: a list is too short where its one item is wrong."""
    errors = error.errors()
    inner = [e["loc"] for e in errors]
    return "; ".join(_describe(e) for e in errors if not any(_is_inside(loc, e["loc"]) for loc in inner))


def _is_inside(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Whether one place in a config lies within another."""
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _describe(error: Mapping[str, Any]) -> str:
    """One pydantic error as `key.key: what is wrong`."""
    where = ".".join(str(part) for part in error["loc"] if part not in (GIVEN, NAMED))
    if error["type"] == "unexpected_keyword_argument":
        return f"{where}: unknown key"
    if error["type"] in ("missing", "missing_argument"):
        return f"{where}: missing"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{where}: {message}, is {error['input']!r}"
