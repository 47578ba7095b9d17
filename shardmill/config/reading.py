"""Read YAML strictly, and tell in one line what pydantic found wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shardmill import files
from shardmill.errors import ConfigError


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; raises ConfigError."""
    try:
        text = files.read_text(path)
        repeated = _repeated_key(yaml.compose(text, yaml.SafeLoader))
        if repeated:
            raise ConfigError(f"{path}: {repeated}")
        return yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not a config: it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError) as error:  # the last three: a value, such as a date
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _repeated_key(root: yaml.Node | None) -> str:
    """Name the first key that a mapping holds twice, or return "". YAML itself silently takes the last."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue  # an alias may point back to a node that contains it
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and names.count(key.value) > 1]
            if twice:
                return f"{twice[-1].value}: given twice (line {twice[-1].start_mark.line + 1}); keep one"
            waiting += [part for pair in node.value for part in pair]
    return ""


# Pydantic's names, in an error's location, for the alternatives of a key that takes a value or a word.
GIVEN, NAMED = "(given)", "(named)"


def describe_all(error: ValidationError) -> str:
    """Return what is wrong with each key, without errors that only follow from another."""
    errors = error.errors()
    inner = [e["loc"] for e in errors]
    return "; ".join(_describe(e) for e in errors if not any(_is_inside(loc, e["loc"]) for loc in inner))


def _is_inside(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Return whether one place in a config lies within another."""
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _describe(error: Mapping[str, Any]) -> str:
    """Return one pydantic error as `key.key: what is wrong`."""
    where = ".".join(str(part) for part in error["loc"] if part not in (GIVEN, NAMED))
    if error["type"] == "unexpected_keyword_argument":
        return f"{where}: unknown key"
    if error["type"] in ("missing", "missing_argument"):
        return f"{where}: missing"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{where}: {message}, is {error['input']!r}"
