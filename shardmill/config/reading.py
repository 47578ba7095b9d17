"""From a config's file, or what Snakemake makes of it, to the checked config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardmill.config.model import Config
from shardmill.config.problems import problems
from shardmill.errors import ConfigError
from shardmill.pydantic_errors import describe_all
from shardmill.yamlfile import read_yaml

OLD_KEY, NEW_KEY = "weights", "precision"  # of `convert`


def load(path: Path, root: Path = Path(".")) -> Config:
    """The config in the file `path`; raises ConfigError. `root` is where relative paths in it start."""
    return parse(read_yaml(path), str(path), root)


def find(model: str, folder: Path = Path("configs")) -> Path:
    """The config in `folder` that names a model; raises ConfigError where none or more than one does."""
    named = [file for file in sorted(folder.glob("*.yaml")) if _model_of(file) == model]
    if len(named) != 1:
        found = ", ".join(map(str, named)) or "none"
        raise ConfigError(f"{folder}: {found} names the model {model}; say which with --configfile")
    return named[0]


def _model_of(path: Path) -> Any:
    """The model that a config names; None for a file that is no config, which is not the one to look for."""
    try:
        content = read_yaml(path)
    except ConfigError:
        return None
    return content.get("model") if isinstance(content, Mapping) else None


def parse(content: Any, name: str = "config", root: Path = Path(".")) -> Config:
    """A mapping (as Snakemake hands it over) as a Config; raises ConfigError with `name` in front."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name}: expected a mapping of keys, see configs/README.md")
    if "batch" in content and "model" not in content:
        raise ConfigError(f"{name}: a batch of several models; give the config of one of them")
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
    """Every string in nested mappings and lists, one after the other."""
    if isinstance(content, Mapping):
        return "".join(map(_text, [*content.keys(), *content.values()]))
    if isinstance(content, list | tuple):
        return "".join(map(_text, content))
    return content if isinstance(content, str) else ""


def _renamed(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The content with `convert.precision` for `convert.weights`, as that was called. Raises ConfigError for both."""
    convert = content.get("convert")
    if not isinstance(convert, Mapping) or OLD_KEY not in convert:
        return dict(content)
    if NEW_KEY in convert:
        raise ConfigError(f"{name}: convert.{OLD_KEY}: is the old name of convert.{NEW_KEY}; keep that alone")
    rest = {key: value for key, value in convert.items() if key != OLD_KEY}
    return {**content, "convert": rest | {NEW_KEY: convert[OLD_KEY]}}


def checked(settings: Mapping[str, Any]) -> Config:
    """The config of settings that were looked at before the work began, or of a part of them."""
    return TypeAdapter(Config).validate_python(dict(settings))


def schema() -> dict[str, Any]:
    """JSON schema of a config file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(Config).json_schema()}
