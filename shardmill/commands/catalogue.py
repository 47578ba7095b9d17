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
    """A model_type, what it builds as, the checkpoints of it that fit, and the configs that are for such a one."""

    model_type: str
    kind: str  # "decoder" or "encoder"
    covers: str
    configs: tuple[str, ...]


def list_families(folder: Path = Path("configs")) -> tuple[Family, ...]:
    """Return every family that builds, by name, with the configs in a folder."""
    types = {str(file): model_type(file) for file in sorted(folder.glob("*.yaml"))}
    return tuple(
        Family(name, kind, covers(name, kind), tuple(file for file, found in types.items() if found == name))
        for kind in FOLDERS
        for name in supported(kind)
    )


def unknown(folder: Path = Path("configs")) -> tuple[str, ...]:
    """Return the configs in a folder of which it is not known what model they are for: its config.json is not here."""
    return tuple(str(file) for file in sorted(folder.glob("*.yaml")) if not model_type(file))


def covers(name: str, kind: str = DECODER) -> str:
    """Return what checkpoints a family covers, in the words of its module."""
    text = family(name, kind).__doc__ or ""
    return text.partition("\n")[0].removeprefix(f"model_type {name}: ")


def model_type(file: Path) -> str:
    """Return the model_type of a config's model, from whichever config.json of it is here; "" if none is."""
    try:
        content = read_yaml(file)
        folders = _folders(content)
    except (ConfigError, LookupError, TypeError, AttributeError):  # no config of a model
        return ""
    for folder in folders:
        try:
            return str(load_json(folder / "config.json")["model_type"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return ""


def _folders(content: Any) -> list[Path]:
    """Return where the config.json of a config's model may lie."""
    name, path = content["model"], content["source"].get("path")
    return [*([Path(path)] if path else []), Path("build") / name / "source", Path("resources") / name]
