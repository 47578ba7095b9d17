"""Read a config strictly: YAML, its keys and their types, and then the problems that its values have together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from shardmill import files
from shardmill.config.model import GIVEN, NAMED, Config
from shardmill.config.problems import problems
from shardmill.errors import ConfigError

LIKE = 0.75  # how alike a key must be to one that is not known, to be offered in its place; 1 is equal
OLD_KEY, NEW_KEY = "weights", "precision"  # of `convert`
GONE, STAMPED = "method", "stamped"  # of `convert`: the key, and what every part now is


def load(path: Path, root: Path = Path(".")) -> Config:
    """Return the config in the file `path`; raises ConfigError. `root` is where relative paths in it start."""
    return parse(read_yaml(path), str(path), root)


def find_config(model: str, folder: Path = Path("configs")) -> Path:
    """Return the config in `folder` that names a model; raises ConfigError unless exactly one config does."""
    named = [file for file in sorted(folder.glob("*.yaml")) if _model_of(file) == model]
    if len(named) != 1:
        names = ", ".join(map(str, named)) or "none"
        raise ConfigError(f"{folder}: {names} names the model {model}; say which with --configfile")
    return named[0]


def _model_of(path: Path) -> Any:
    """Return the model that a config names; None if the file is not a config."""
    try:
        content = read_yaml(path)
    except ConfigError:
        return None
    return content.get("model") if isinstance(content, Mapping) else None


def parse(content: Any, name: str = "config", root: Path = Path(".")) -> Config:
    """Return a mapping (as Snakemake hands it over) as a Config; raises ConfigError with `name` in front."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name}: expected a mapping of keys, see configs/README.md")
    if "batch" in content and "model" not in content:
        raise ConfigError(f"{name}: a batch of several models; give the config of one model")
    if "\0" in (text := _text(content)) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{name}: holds a character that no file's name can have")
    try:
        config = TypeAdapter(Config).validate_python(_renamed(content, name))
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe_all(error)}") from error
    for problem in problems(config, root):
        raise ConfigError(f"{name}: {problem}")
    return config


def _text(content: Any) -> str:
    """Return every string in nested mappings and lists, one after the other."""
    if isinstance(content, Mapping):
        return "".join(map(_text, [*content.keys(), *content.values()]))
    if isinstance(content, list | tuple):
        return "".join(map(_text, content))
    return content if isinstance(content, str) else ""


def _renamed(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the content with today's keys: `convert.precision` was `convert.weights`, and `convert.method` is gone.

    Raises ConfigError if both names of the precision are given, or a method that no longer exists.
    """
    convert = content.get("convert")
    if not isinstance(convert, Mapping):
        return dict(content)
    if convert.get(GONE, STAMPED) != STAMPED:
        raise ConfigError(f"{name}: convert.{GONE}: is gone, since every part is {STAMPED}; leave it out")
    rest = {key: value for key, value in convert.items() if key not in (OLD_KEY, GONE)}
    if OLD_KEY in convert:
        if NEW_KEY in convert:
            raise ConfigError(f"{name}: convert.{OLD_KEY}: is the old name of convert.{NEW_KEY}; keep that alone")
        rest[NEW_KEY] = convert[OLD_KEY]
    return {**content, "convert": rest}


def config_of(settings: Mapping[str, Any]) -> Config:
    """Return the config of settings that were checked before the work began, or of a part of these settings."""
    return TypeAdapter(Config).validate_python(dict(settings))


def schema() -> dict[str, Any]:
    """Return JSON schema of a config file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(Config).json_schema()}


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
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            names = Counter(key.value for key in keys)
            twice = [key for key in keys if names[key.value] > 1]
            if twice:
                return f"{twice[-1].value}: given twice (line {twice[-1].start_mark.line + 1}); keep one"
            waiting += [part for pair in node.value for part in pair]
    return ""


def describe_all(error: ValidationError) -> str:
    """Return what is wrong with each key, without errors that only follow from another."""
    errors = error.errors()
    inner = [e["loc"] for e in errors]
    return "; ".join(_describe(e) for e in errors if not any(_is_inside(loc, e["loc"]) for loc in inner))


@cache
def _keys() -> list[str]:
    """Return every key of a config by its dotted name."""
    whole = schema()
    return list(_dotted(whole, whole["$defs"], ""))


def _dotted(node: Mapping[str, Any], sections: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the keys of a section of the schema, and the keys of the sections in it."""
    for name, child in node.get("properties", {}).items():
        yield f"{prefix}{name}"
        for one in (child, *child.get("anyOf", ()), *child.get("oneOf", ())):
            yield from _dotted(sections.get(one.get("$ref", "").rpartition("/")[2], {}), sections, f"{prefix}{name}.")


def _is_inside(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Return whether one place in a config lies within another."""
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _describe(error: Mapping[str, Any]) -> str:
    """Return one pydantic error as `key.key: what is wrong`."""
    where = ".".join(str(part) for part in error["loc"] if part not in (GIVEN, NAMED))
    if error["type"] == "unexpected_keyword_argument":
        close = get_close_matches(where, _keys(), n=1, cutoff=LIKE)
        return f"{where}: unknown key{f'; did you mean {close[0]}?' if close else ''}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{where}: missing"
    message = error["msg"][0].lower() + error["msg"][1:]
    bare = error["type"] == "string_type" and isinstance(error["input"], bool)  # YAML reads no and yes as these
    return f"{where}: {message}, is {error['input']!r}{'; put the word in quotes' if bare else ''}"
