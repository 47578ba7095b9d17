"""Reads YAML strictly: mistakes that YAML itself lets pass are errors, in one line that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shardmill import regular
from shardmill.errors import ConfigError


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; raises ConfigError."""
    try:
        text = regular.read_text(path)
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
    """Names the first key that a mapping holds twice, or returns "". YAML itself silently takes the last."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue  # an alias may lead back to where it stands
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
