"""Which models can be built: the families, and the configs for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.config.reading import read_yaml
from shardmill.errors import ConfigError
from shardmill.files import load_json
from shardmill.models import DECODER, FOLDERS, family, supported


@dataclass(frozen=True)
class Family:
    """A model_type with its kind of build, the checkpoints that it covers, and the configs for these checkpoints."""

    model_type: str
    kind: str  # "decoder" or "encoder"
    covers: str
    configs: tuple[str, ...]


def list_families(folder: Path = Path("configs")) -> tuple[Family, ...]:
    """Return every supported family by name, with the configs in a folder."""
    types = {str(file): model_type(file) for file in sorted(folder.glob("*.yaml"))}
    return tuple(
        Family(name, kind, covers(name, kind), tuple(file for file, found in types.items() if found == name))
        for kind in FOLDERS
        for name in supported(kind)
    )


def unknown(folder: Path = Path("configs")) -> tuple[str, ...]:
    """Return the configs in a folder whose model_type is unknown, because the model's config.json is not here."""
    return tuple(str(file) for file in sorted(folder.glob("*.yaml")) if not model_type(file))


def covers(name: str, kind: str = DECODER) -> str:
    """Return the checkpoints that a family covers, in the words of its module."""
    text = family(name, kind).__doc__ or ""
    return text.partition("\n")[0].removeprefix(f"model_type {name}: ")


def model_type(file: Path) -> str:
    """Return the model_type of a config's model from the first config.json on this machine; "" if it is missing."""
    try:
        content = read_yaml(file)
        folders = _folders(content)
    except (ConfigError, LookupError, TypeError, AttributeError):  # not a config of a model
        return ""
    for folder in folders:
        try:
            return str(load_json(folder / "config.json")["model_type"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return ""


def _folders(content: Any) -> list[Path]:
    """Return the folders that may contain the config.json of a config's model."""
    name, path = content["model"], content["source"].get("path")
    return [*([Path(path)] if path else []), Path("build") / name / "source", Path("resources") / name]
